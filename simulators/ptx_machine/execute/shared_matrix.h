// Matrices of 16-bit elements in shared memory, as the descriptors of wgmma give them. A descriptor says
// where they begin, how far their parts are from each other, and how chunks of 16 bytes have changed places.
// Those with the 128-byte swizzle are known, in both of the PTX manual's canonical layouts:
//
// - By k, eight rows of 128 bytes are a pattern, of which a product takes 32 bytes of each row. The next
//   eight rows are the stride's offset away.
// - Turned, eight steps of k of 128 bytes, 64 rows, are a pattern. The next eight steps are the stride's
//   offset away, and the next 64 rows are the leading offset away.
//
// The rows are those of the left matrix, or the columns of the right one.
#pragma once

#include "types.h"

namespace ptx_machine {

struct Instruction;
struct Warp;

constexpr u32 kProductDepth = 16;

class SharedMatrix {
 public:
  static constexpr u32 kChunkBytes = 16, kChunkElements = 8;

  // Reports a descriptor of another form, and one that leads outside of shared memory. `turned` says that
  // steps of k lie beside each other.
  SharedMatrix(const Warp& warp, const Instruction& ins, u64 descriptor, bool turned, u32 rows);

  // Returns the offset of the chunk with element (row, k). The chunk holds elements of neighbouring k, or of
  // neighbouring rows if the matrix is turned.
  u32 chunk(u32 row, u32 k) const;
  // Calls f with the offset of each chunk of so many rows.
  template <class F>
  void for_chunks(u32 first_row, u32 rows, F&& f) const {
    const u32 row_step = turned_ ? kChunkElements : 1, k_step = turned_ ? 1 : kChunkElements;
    for (u32 row = first_row; row < first_row + rows; row += row_step) {
      for (u32 k = 0; k < kProductDepth; k += k_step) f(chunk(row, k));
    }
  }
  // Reads the bits of elements into result[row][k].
  void read(const u8* shared, u32 first_row, u32 rows, u16 (*result)[kProductDepth]) const;

 private:
  u32 start_, leading_, stride_;  // in bytes
  bool turned_;
};

}  // namespace ptx_machine
