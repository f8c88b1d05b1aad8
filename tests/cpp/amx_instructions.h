// AMX instructions as inline assembly. They assemble without compiler flags, and gcc's own intrinsics do not
// say that memory is read. Tile numbers are macro arguments because they are part of the instruction's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "cpu/cpu_features.h"

#if defined(__linux__) && defined(__x86_64__)

#include <sys/syscall.h>
#include <unistd.h>

namespace selfattn::test {

// The configuration that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved1[14] = {};
  uint16_t row_bytes[8] = {};
  uint16_t reserved2[8] = {};
  uint8_t rows[8] = {};
  uint8_t reserved3[8] = {};

  TileConfig& tile(int number, int tile_rows, int tile_row_bytes) {
    rows[number] = static_cast<uint8_t>(tile_rows);
    row_bytes[number] = static_cast<uint16_t>(tile_row_bytes);
    return *this;
  }
  TileConfig& all(int tile_rows, int tile_row_bytes) {
    for (int n = 0; n < 8; ++n) tile(n, tile_rows, tile_row_bytes);
    return *this;
  }
};
static_assert(sizeof(TileConfig) == 64);

inline void ldtilecfg(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
inline void sttilecfg(TileConfig& config) { __asm__ volatile("sttilecfg %0" : "=m"(config)::"memory"); }
inline void tilerelease() { __asm__ volatile("tilerelease" ::: "memory"); }

#define TILEZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::: "memory")
#define TILELOADD(tile, base, stride)                                                                 \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(base), "r"(static_cast<ptrdiff_t>(stride)) \
                   : "memory")
#define TILESTORED(tile, base, stride)                                                                     \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"(static_cast<ptrdiff_t>(stride)) \
                   : "memory")
// Operands are in Intel's order: the result, the rows, the columns.
#define TDPBF16PS(tile, rows, columns) \
  __asm__ volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #tile::: "memory")

// Returns whether the processor itself executes AMX here; then no instruction reaches the emulator.
inline bool native_amx() {
  static const bool native = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return cpu::cpu_features().amx_bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return native;
}

// This is asked before main: without permission the processor would execute only some of the instructions.
inline const bool kNativeAmx = native_amx();

}  // namespace selfattn::test

#endif
