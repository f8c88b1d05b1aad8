// Templates that rows.cpp calls; selfattn_ext/build/sources.py lists the instances of the first.
#pragma once

#include "rows.h"

namespace selfattn::cuda::rows {

template <DType kDType>
void prepare_of_dtype(const AttentionParams& params, const BackwardArguments& arguments, void* memory,
                      const Launch& where);

// T is the type of the rows and of the sums.
template <class T>
void sum_of_rows_as(const AttentionParams& params, const T* rows, T* sums, bool shared_by_batch,
                    const Launch& where);

}  // namespace selfattn::cuda::rows
