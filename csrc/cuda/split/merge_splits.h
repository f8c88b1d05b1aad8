// Joins the splits of few-query sequences, in their order. All kernels share it.
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
  T dropout_scale = T(1);  // the factor of outputs whose weights were dropped but not scaled
  bool out_pairs = false;  // whether results can be written two elements at a time
};

// Compiled in merge_splits.cu for each dtype, with T its accumulation type.
template <DType kDType, class T>
void run_merge(const MergePlan<T>& plan, CUstream_st* stream);

}  // namespace selfattn::cuda
