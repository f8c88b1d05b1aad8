// The numbers that products take: 16-bit ones as they are, float32 as a sum of bfloat16 pieces.
//
// x = x0 + x1 + x2, where each piece is the rest so far, rounded to bfloat16. It has 8 significant bits and a
// sign, so that three hold the 24 bits of a float32 exactly. Of the nine products of pieces the six with i +
// j < 3 are kept. What is left out is below 2^-23 |x y|, of either sign, and typically 2^-25, which is the
// rounding of float32 itself. Two pieces (three products) leave 2^-16, one leaves 2^-8: these are torch's
// settings "high" and "medium", for which others use TF32 (2^-11).
//
// TF32 was not chosen because three products of TF32 numbers cost the same as six of bfloat16 ones, but hold
// 22 bits and need a second layout of every fragment, and each warp would split the keys and values for
// itself. Pieces are made once per block, which has looked at every number by then, and from there on the
// kernel is that of the 16-bit types.
#pragma once

#include "../../core/dtype.h"
#include "../common/ptx_sm80.cuh"

namespace selfattn::cuda::mma {

template <DType kDType>
struct Arithmetic {                               // bfloat16, and pieces of float32
  static constexpr uint32_t kOnes = 0x3f803f80u;  // a pair of ones
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_bfloat16(low, high);
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    ptx::multiply_bfloat16(d, a, b);
  }
};

template <>
struct Arithmetic<DType::kFloat16> {
  static constexpr uint32_t kOnes = 0x3c003c00u;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return ptx::pack_float16(low, high);
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    ptx::multiply_float16(d, a, b);
  }
};

// Returns two numbers rounded to bfloat16, as a pair. The numbers keep what the rounding took away, exactly.
__device__ __forceinline__ uint32_t take_piece(float& low, float& high) {
  const uint32_t pair = ptx::pack_bfloat16(low, high);
  low -= float_from_bits(pair << 16);
  high -= float_from_bits(pair & 0xffff0000u);
  return pair;
}

// Whether a float32 has no pieces: it is NaN or Inf, or its pieces or their products could overflow or become
// subnormal. Such numbers are left out of the products, see sm80/special_numbers.cuh.
__device__ __forceinline__ bool has_no_pieces(float x) {
  constexpr uint32_t kLeast = (127u - 80u) << 23, kMost = (127u + 60u) << 23;
  const uint32_t magnitude = bits_from_float(x) & 0x7fffffffu;
  return magnitude != 0 && magnitude - kLeast > kMost - kLeast;
}

}  // namespace selfattn::cuda::mma
