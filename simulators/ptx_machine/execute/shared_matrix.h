// Matrices of 16-bit elements in shared memory, as the descriptors of wgmma give them. A descriptor says
// where they begin, how far their parts are from each other, and how chunks of 16 bytes have changed places.
// Those with the 128-byte swizzle are known, in both of the PTX manual's canonical layouts:
//
// - by k: eight rows of 128 bytes are a pattern, of which a product takes 32 bytes of each row; the next
// eight
//   rows are the stride's offset away.
// - turned: eight steps of k of 128 bytes, 64 rows, are a pattern; the next eight steps are the stride's
// offset
//   away, the next 64 rows the leading offset.
//
// "Rows" are those of the left matrix, and columns of the right one.
#pragma once

#include "types.h"

namespace ptx_machine {

struct Instruction;
struct Warp;

constexpr u32 kProductDepth = 16;

class SharedMatrix {
 public:
  static constexpr u32 kChunkBytes = 16, kChunkElements = 8;

  // Reports a descriptor that is not one of these, and what lies outside of shared memory. `turned`: with
  // steps of k beside each other.
  SharedMatrix(const Warp& warp, const Instruction& ins, u64 descriptor, bool turned, u32 rows);

  // The offset of the chunk with element (row, k). It holds elements of neighbouring k, or rows if it is
  // turned.
  u32 chunk(u32 row, u32 k) const;
  // Calls f with the offset of each chunk of so many rows.
  template <class F>
  void for_chunks(u32 first_row, u32 rows, F&& f) const {
    const u32 row_step = turned_ ? kChunkElements : 1, k_step = turned_ ? 1 : kChunkElements;
    for (u32 row = first_row; row < first_row + rows; row += row_step) {
      for (u32 k = 0; k < kProductDepth; k += k_step) f(chunk(row, k));
    }
  }
  // The bits of elements: result[row][k].
  void read(const u8* shared, u32 first_row, u32 rows, u16 (*result)[kProductDepth]) const;

 private:
  u32 start_, leading_, stride_;  // bytes
  bool turned_;
};

}  // namespace ptx_machine
