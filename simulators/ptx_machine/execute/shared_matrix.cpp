#include "execute/shared_matrix.h"

#include <cstdio>

#include "execute/warp.h"

namespace ptx_machine {

namespace {

constexpr u64 kSwizzle128 = 1;
constexpr u32 kRowBytes = 128, kRowElements = 64, kPatternRows = 8, kPatternBytes = kRowBytes * kPatternRows;
// A descriptor's bits: the beginning and both offsets in units of 16 bytes, the base offset, the swizzle.
constexpr u64 kNumber = 0x3fff;
constexpr int kLeadingAt = 16, kStrideAt = 32, kBaseAt = 49, kSwizzleAt = 62;
constexpr u64 kKnown =
    kNumber | kNumber << kLeadingAt | kNumber << kStrideAt | 7ull << kBaseAt | 3ull << kSwizzleAt;

[[noreturn]] void refuse(const Warp& warp, const Instruction& ins, u64 descriptor, const std::string& why) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(descriptor));
  fail(warp, ins, kWholeWarp, std::string("the matrix descriptor ") + text + " " + why);
}

}  // namespace

SharedMatrix::SharedMatrix(const Warp& warp, const Instruction& ins, u64 descriptor, bool turned, u32 rows)
    : start_(static_cast<u32>(descriptor & kNumber) * kChunkBytes),
      leading_(static_cast<u32>(descriptor >> kLeadingAt & kNumber) * kChunkBytes),
      stride_(static_cast<u32>(descriptor >> kStrideAt & kNumber) * kChunkBytes),
      turned_(turned) {
  if ((descriptor & ~kKnown) != 0) refuse(warp, ins, descriptor, "has bits that mean nothing");
  if (descriptor >> kSwizzleAt != kSwizzle128) refuse(warp, ins, descriptor, "lacks the 128-byte swizzle");
  if ((descriptor >> kBaseAt & 7) != 0) refuse(warp, ins, descriptor, "has a base offset");
  const u32 in_row = start_ % kRowBytes, taken = turned ? kRowBytes : 2 * kChunkBytes;
  if (start_ % kPatternBytes != in_row) {
    refuse(warp, ins, descriptor, "begins within the eight rows of a pattern, and has no base offset");
  }
  if (in_row + taken > kRowBytes)
    refuse(warp, ins, descriptor, "begins so that its rows are not in 128 bytes");
  if (stride_ % kPatternBytes != 0 || (turned && rows > kRowElements && leading_ % kPatternBytes != 0)) {
    refuse(warp, ins, descriptor, "has offsets that are not multiples of the pattern of 1024 bytes");
  }
  const u32 bytes = warp.block->shared_bytes;
  for_chunks(0, rows, [&](u32 offset) {
    if (offset >= bytes || offset + kChunkBytes > bytes) {
      refuse(warp, ins, descriptor,
             "leads to byte " + std::to_string(static_cast<s32>(offset)) + ", outside of the " +
                 std::to_string(bytes) + " bytes of shared memory");
    }
  });
}

u32 SharedMatrix::chunk(u32 row, u32 k) const {
  u32 address = start_;
  if (turned_) {
    address += row / kRowElements * leading_ + row % kRowElements / kChunkElements * kChunkBytes +
               k / kPatternRows * stride_ + k % kPatternRows * kRowBytes;
  } else {
    address +=
        row / kPatternRows * stride_ + row % kPatternRows * kRowBytes + k / kChunkElements * kChunkBytes;
  }
  return swizzled_by_128(address) - kSharedBase;
}

void SharedMatrix::read(const u8* shared, u32 first_row, u32 rows, u16 (*result)[kProductDepth]) const {
  if (!turned_) {
    for (u32 row = 0; row < rows; ++row) {
      for (u32 k = 0; k < kProductDepth; k += kChunkElements) {
        std::memcpy(result[row] + k, shared + chunk(first_row + row, k), kChunkBytes);
      }
    }
    return;
  }
  for (u32 row = 0; row < rows; row += kChunkElements) {
    for (u32 k = 0; k < kProductDepth; ++k) {
      u16 elements[kChunkElements];
      std::memcpy(elements, shared + chunk(first_row + row, k), kChunkBytes);
      for (u32 n = 0; n < kChunkElements; ++n) result[row + n][k] = elements[n];
    }
  }
}

}  // namespace ptx_machine
