// Whether tensors share memory: a tensor that is written must not alias another.
#pragma once

#include "checks.h"

namespace selfattn::ops {

// Whether elements of a tensor may be the same memory. After slicing and transposing they never are, because
// each stride passes over everything that the smaller ones reach. Strides of as_strided may interleave
// without meeting; only a search could tell, so they count as if they met.
bool overlaps_itself(const Input& input);

// Whether two tensors have elements in the same memory. Interleaved tensors do not, such as keys and values
// in one tensor; if a short search cannot show that, they count as if they did.
bool may_share(const Input& left, const Input& right);

// Whether `part` consists of columns of `whole`, in all its rows. Sets `first` to the first column.
bool is_columns_of(const Input& part, const Input& whole, int64_t* first);

}  // namespace selfattn::ops
