// The multiply-adds of peak.h for AMX. TDPBF16PS multiplies two tiles of 16 x 32 bfloat16 into 16 x 16
// floats.
#if defined(__x86_64__)

#include <cstdint>

#include "peak.h"

namespace selfattn::cpu {
namespace {

// The instructions are text for the reasons that cpu/pairs/engine_amx.h gives.
template <int kC, int kA, int kB>
inline void tile_dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
template <int kTile>
inline void tile_load(const void* data) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(int64_t{64}), "i"(kTile) : "memory");
}

// A product starts every 16 cycles and ends 52 later: four sums keep the unit busy. Two by two, they take two
// tiles of either operand, as in the kernels.
float multiply_add(int64_t iterations) {
  alignas(64) uint8_t configuration[64] = {1};  // palette
  for (int tile = 0; tile < 8; ++tile) {
    configuration[16 + 2 * tile] = 64;  // bytes per row
    configuration[48 + tile] = 16;      // rows
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
  alignas(64) uint16_t operand[16 * 32];
  for (uint16_t& number : operand) number = 0x3f00;  // 0.5, because with zeros a processor might run cooler
  alignas(64) float sums[16 * 16] = {};
  tile_load<0>(sums);
  tile_load<1>(sums);
  tile_load<2>(sums);
  tile_load<3>(sums);
  tile_load<4>(operand);
  tile_load<5>(operand);
  tile_load<6>(operand);
  tile_load<7>(operand);
  for (int64_t n = 0; n < iterations; ++n) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(sums), "r"(int64_t{64}) : "memory");
  __asm__ volatile("tilerelease" : : : "memory");
  return sums[0];
}

}  // namespace

extern const PeakLoops kPeakAmx;
const PeakLoops kPeakAmx = {"amx", 4.0 * 2 * 16 * 16 * 32, &multiply_add, nullptr, nullptr};

}  // namespace selfattn::cpu

#endif
