// Joins the splits of few-query sequences, in their order: for every kernel the same.
#pragma once

#include "../common/row_alignment.h"
#include "split_keys.h"

struct CUstream_st;

namespace selfattn::cuda {

template <class T>
struct MergePlan {
  AttentionParams params;
  ForwardOutputs outputs;
  SplitLaunch<T> split_launch;
  T dropout_scale = T(1);  // of outputs whose weights were only dropped
  bool out_pairs = false;  // whether results can be written two elements at a time
};

// Compiled in merge_splits.cu for each dtype, with T its accumulation type.
template <DType kDType, class T>
void run_merge(const MergePlan<T>& plan, CUstream_st* stream);

}  // namespace selfattn::cuda
