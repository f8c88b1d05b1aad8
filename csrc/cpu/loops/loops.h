// The kernel "loops": attention as three nested loops over queries, keys and dimensions. It is here to be
// read, and faster kernels are checked against it and measured by it. It is never chosen unless it is asked
// for, and has no forward mode and no second derivatives.
#pragma once

#include "../cpu_kernel.h"

namespace selfattn::cpu {

extern const Kernel kLoops;

namespace loops {

void forward(const AttentionParams& params, const ForwardOutputs& outputs, const ThreadPool& pool);
void weights(const AttentionParams& params, const WeightsOutputs& outputs, const ThreadPool& pool);
void weight_sums(const AttentionParams& params, const WeightSums& sums, const ThreadPool& pool);
size_t backward_workspace(const AttentionParams& params);
void backward(const AttentionParams& params, const BackwardArguments& arguments, const ThreadPool& pool);
void scores(const ScoresParams& params, const ThreadPool& pool);
void scores_backward(const ScoresParams& params, const ThreadPool& pool);
void masked_softmax(const SoftmaxParams& params, const ThreadPool& pool);
void masked_softmax_backward(const SoftmaxParams& params, const ThreadPool& pool);

}  // namespace loops
}  // namespace selfattn::cpu
