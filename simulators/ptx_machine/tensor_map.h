// Tensor maps as this machine encodes them. cuTensorMapEncodeTiled (runtime/driver_functions.cpp) writes
// them, and cp.async.bulk.tensor (instructions/box_copies.cpp) reads them. A device's encoding is not
// published, and nothing else reads this one.
#pragma once

#include "types.h"

namespace ptx_machine {

struct TensorMap {
  static constexpr int kBytes = 128, kAlignment = 64;
  static constexpr int kMostDimensions = 5;
  static constexpr u64 kMark = 0x70616d726f736e65ull;

  u64 mark = 0;
  u64 address = 0;
  u64 strides[kMostDimensions] = {};           // in bytes; the first is that of an element
  u32 most_coordinates[kMostDimensions] = {};  // sizes of the tensor, less one: they reach 2^32
  u16 box[kMostDimensions] = {};
  u8 dimensions = 0;
  bool swizzled = false;  // by 128 bytes
  u64 sum = 0;            // of what is above, so that other bytes are seen not to be a map

  u64 size(int dimension) const { return u64{most_coordinates[dimension]} + 1; }
  u32 element_bytes() const { return static_cast<u32>(strides[0]); }
  u32 row_bytes() const { return box[0] * element_bytes(); }
  u32 rows() const {
    u32 rows = 1;
    for (int n = 1; n < dimensions; ++n) rows *= box[n];
    return rows;
  }
  u64 sum_of_bytes() const {
    u64 total = mark + address + (u64{dimensions} << 8) + swizzled;
    for (int n = 0; n < kMostDimensions; ++n) {
      total = total * 0x9e3779b97f4a7c15ull + strides[n] + most_coordinates[n] + (u64{box[n]} << 40);
    }
    return total;
  }
  bool is_one() const { return mark == kMark && sum == sum_of_bytes(); }
};
static_assert(sizeof(TensorMap) <= TensorMap::kBytes);

// The 128-byte swizzle, of an address in shared memory: chunks of 16 bytes change places within 128 bytes, by
// the number of those 128 bytes within 1024.
inline u32 swizzled_by_128(u32 address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace ptx_machine
