// Whether tensors share memory: what is written must be nobody else's.
#pragma once

#include "checks.h"

namespace selfattn::ops {

// Whether elements of a tensor may be the same memory. In what slicing and transposing make they are not: a
// stride passes over all that the smaller ones reach. Strides of as_strided that are interleaved without
// meeting would take a search, and count as if they met.
bool overlaps_itself(const Input& input);

// Whether two tensors have elements in the same memory. Interleaved ones have not, such as keys and values in
// one tensor; where that would take more than a short search, they count as if they had.
bool may_share(const Input& left, const Input& right);

// Whether `part` is columns of the last dimension of `whole`, of all its rows; says from which element on.
bool is_columns_of(const Input& part, const Input& whole, int64_t* first);

}  // namespace selfattn::ops
