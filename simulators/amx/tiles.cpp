#include "tiles.h"

#include <initializer_list>

#include "bf16_product.h"

namespace amx_emulator {

namespace {

// It copies byte by byte, not by memcpy: so a build with -fsanitize=address checks every one of them.
void copy(uint8_t* to, const uint8_t* from, int count) {
  for (int n = 0; n < count; ++n) to[n] = from[n];
}

void clear(uint8_t* to, int count) {
  for (int n = 0; n < count; ++n) to[n] = 0;
}

bool all_zero(const uint8_t* bytes, int first, int last) {
  for (int n = first; n <= last; ++n) {
    if (bytes[n] != 0) return false;
  }
  return true;
}

void zero_tail(TileState& state, int tile, int row) {
  clear(state.tiles[tile][row] + state.row_bytes[tile], kMaxRowBytes - state.row_bytes[tile]);
}

void zero_upper_rows(TileState& state, int tile, int first) {
  for (int row = first; row < kMaxRows; ++row) clear(state.tiles[tile][row], kMaxRowBytes);
}

const char* unusable(const TileState& state, int tile) {
  if (!state.configured) return "#UD: no tile is configured";
  if (state.rows[tile] == 0) return "#UD: this tile is not in the configuration";
  if (state.row_bytes[tile] % 4 != 0) return "#UD: the rows of this tile are not a multiple of four bytes";
  return nullptr;
}

const char* untransferable(const TileState& state, int tile) {
  const char* fault = unusable(state, tile);
  if (fault != nullptr) return fault;
  return state.start_row >= state.rows[tile] ? "#UD: start_row is beyond the rows of this tile" : nullptr;
}

}  // namespace

const char* load_config(TileState& state, const uint8_t* memory) {
  uint8_t config[kConfigBytes];
  copy(config, memory, kConfigBytes);
  if (config[0] == 0) {
    release(state);
    return nullptr;
  }
  if (config[0] != 1) return "#GP: the only palettes are 0 and 1";
  if (!all_zero(config, 2, 15) || !all_zero(config, 32, 47) || !all_zero(config, 56, 63)) {
    return "#GP: reserved bytes of the tile configuration are not zero";
  }
  uint8_t rows[kTiles];
  uint16_t row_bytes[kTiles];
  for (int n = 0; n < kTiles; ++n) {
    rows[n] = config[48 + n];
    row_bytes[n] = static_cast<uint16_t>(config[16 + 2 * n] | (config[17 + 2 * n] << 8));
    if (row_bytes[n] > kMaxRowBytes) return "#GP: a tile with more than 64 bytes in a row";
    if (rows[n] > kMaxRows) return "#GP: a tile with more than 16 rows";
    if ((rows[n] == 0) != (row_bytes[n] == 0)) return "#GP: a tile with rows but no columns, or the reverse";
  }
  release(state);
  state.configured = true;
  state.start_row = config[1];
  for (int n = 0; n < kTiles; ++n) {
    state.rows[n] = rows[n];
    state.row_bytes[n] = row_bytes[n];
  }
  return nullptr;
}

void store_config(const TileState& state, uint8_t* memory) {
  uint8_t config[kConfigBytes];
  clear(config, kConfigBytes);
  if (state.configured) {
    config[0] = 1;
    config[1] = state.start_row;
    for (int n = 0; n < kTiles; ++n) {
      config[16 + 2 * n] = static_cast<uint8_t>(state.row_bytes[n]);
      config[48 + n] = state.rows[n];
    }
  }
  copy(memory, config, kConfigBytes);
}

void release(TileState& state) {
  state.configured = false;
  state.start_row = 0;
  for (int n = 0; n < kTiles; ++n) {
    state.rows[n] = 0;
    state.row_bytes[n] = 0;
    zero_upper_rows(state, n, 0);
  }
}

const char* zero(TileState& state, int tile) {
  const char* fault = unusable(state, tile);
  if (fault != nullptr) return fault;
  zero_upper_rows(state, tile, 0);
  state.start_row = 0;
  return nullptr;
}

const char* load(TileState& state, int tile, const uint8_t* memory, ptrdiff_t stride) {
  const char* fault = untransferable(state, tile);
  if (fault != nullptr) return fault;
  // Rows below start_row were loaded before the instruction was interrupted.
  zero_upper_rows(state, tile, state.start_row);
  for (int row = state.start_row; row < state.rows[tile]; ++row) {
    copy(state.tiles[tile][row], memory + row * stride, state.row_bytes[tile]);
    zero_tail(state, tile, row);
  }
  state.start_row = 0;
  return nullptr;
}

const char* store(TileState& state, int tile, uint8_t* memory, ptrdiff_t stride) {
  const char* fault = untransferable(state, tile);
  if (fault != nullptr) return fault;
  for (int row = state.start_row; row < state.rows[tile]; ++row) {
    copy(memory + row * stride, state.tiles[tile][row], state.row_bytes[tile]);
  }
  state.start_row = 0;
  return nullptr;
}

const char* dot_bf16(TileState& state, int tile, int source1, int source2) {
  if (tile == source1 || tile == source2 || source1 == source2) return "#UD: the three tiles must differ";
  for (const int n : {tile, source1, source2}) {
    const char* fault = unusable(state, n);
    if (fault != nullptr) return fault;
  }
  if (state.rows[tile] != state.rows[source1]) {
    return "#UD: the rows of the result are not the rows of the first source";
  }
  if (state.row_bytes[tile] != state.row_bytes[source2]) {
    return "#UD: the columns of the result are not the columns of the second source";
  }
  if (state.row_bytes[source1] / 4 != state.rows[source2]) {
    return "#UD: the pairs in a row of the first source are not the rows of the second";
  }
  const ProductShape shape{state.rows[tile], state.row_bytes[source1] / 4, state.row_bytes[tile] / 4};
  bf16_product(shape, state.tiles[tile], state.tiles[source1], state.tiles[source2]);
  for (int row = 0; row < state.rows[tile]; ++row) zero_tail(state, tile, row);
  zero_upper_rows(state, tile, state.rows[tile]);
  state.start_row = 0;
  return nullptr;
}

}  // namespace amx_emulator
