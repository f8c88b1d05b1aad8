// The fused kernel for AMX, on processors that have AVX-512 with it. Strips are two vectors of queries: that
// is two tiles, and sums over the queries of a strip come in whole steps.
#if defined(__x86_64__)

#define SELFATTN_ISA amx
#define SELFATTN_TILE_VECTORS 2
// Decoding asks for lines into the level-2 cache, which on these processors has more of them under way than
// the level-1 cache: measured, float32 and bfloat16 of one query at 98 and 92 % of the read bandwidth instead
// of 93 and 82 %.
#define SELFATTN_FETCH_INTO 2

#include "begin_avx512_bf16.h"
#include "simd_avx512.h"
#include "../bfloat16/engine_amx.h"
#include "../bfloat16/decode_by_tiles.h"
#include "../bfloat16/decode_by_vectors.h"
#include "../bfloat16/exact_by_tiles.h"
#include "../bfloat16/pipeline.h"
#include "../bfloat16/gradient_pipeline.h"
#include "../bfloat16/pair_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedAmx;
constexpr const char* kDescription = "tiled online softmax, products of bfloat16 tiles";
const Kernel kForcedAmx = amx::pair_kernel<amx::AllCalls>("amx", kDescription);
const Kernel kFusedAmx = amx::pair_kernel<amx::GainingCalls>("amx", kDescription, &kForcedAmx);
}  // namespace selfattn::cpu

#endif
