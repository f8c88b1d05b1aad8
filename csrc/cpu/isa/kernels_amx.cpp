// The fused kernel for AMX, on processors that also have AVX-512. Decoding and derivatives are in sources of
// their own, kernels_amx_*.cpp, so that none takes long to compile.
#if defined(__x86_64__)

#include "begin_amx.h"
#define SELFATTN_COMPILE_SHARED
#include "shared_by_amx.h"
#include "../pairs/multiply_by_tiles.h"
#include "../pairs/pipeline.h"
#include "../pairs/pair_kernel.h"
#include "end_target.h"

namespace selfattn::cpu {
extern const Kernel kFusedAmx;
constexpr const char* kDescription = "tiled online softmax, products of bfloat16 tiles";
const Kernel kForcedAmx = amx::pair_kernel<amx::AllCalls>("amx", kDescription);
const Kernel kFusedAmx = amx::pair_kernel<amx::GainingCalls>("amx", kDescription, &kForcedAmx);
}  // namespace selfattn::cpu

#endif
