// The fused kernel for AVX-512 with bfloat16 products. It hands calls that these do not make faster to the
// kernel of kernels_avx512.cpp.
#if defined(__x86_64__)

#define SELFATTN_ISA avx512_bf16

#include "begin_avx512_bf16.h"
#include "simd_avx512.h"
#include "../pairs/engine_avx512.h"
#include "../pairs/decode_by_vectors.h"
#include "../pairs/exact_by_vectors.h"
#include "../pairs/pair_decode.h"
#include "../pairs/pair_backward.h"
#include "../pairs/pair_tangents.h"
#include "../pairs/pair_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedAvx512Bf16;
const Kernel kFusedAvx512Bf16 = avx512_bf16::pair_kernel<avx512_bf16::GainingCalls>(
    "avx512_bf16", "tiled online softmax, products of bfloat16 pairs");
}  // namespace selfattn::cpu

#endif
