// The state that AMX adds to a thread, and what its instructions do to it. It follows the operation sections
// of Intel's Software Developer's Manual. A function that returns a sentence has changed nothing: the
// processor would have raised the exception that the sentence begins with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace amx_emulator {

constexpr int kTiles = 8;
constexpr int kMaxRows = 16;      // palette 1
constexpr int kMaxRowBytes = 64;  // palette 1
constexpr int kConfigBytes = 64;

using TileRows = uint8_t[kMaxRows][kMaxRowBytes];

// All zeros are the initial state, in which nothing is configured.
struct TileState {
  bool configured;
  uint8_t start_row;
  uint8_t rows[kTiles];
  uint16_t row_bytes[kTiles];
  alignas(64) TileRows tiles[kTiles];
};

const char* load_config(TileState& state, const uint8_t* memory);
void store_config(const TileState& state, uint8_t* memory);
void release(TileState& state);
const char* zero(TileState& state, int tile);
// Row r is at memory + r·stride; nothing beside the configured bytes of a row is read or written.
const char* load(TileState& state, int tile, const uint8_t* memory, ptrdiff_t stride);
const char* store(TileState& state, int tile, uint8_t* memory, ptrdiff_t stride);
const char* dot_bf16(TileState& state, int tile, int source1, int source2);

}  // namespace amx_emulator
