// The tensor maps that the emulator's stand-in for the driver (cuda.h) makes for copies of boxes.
#pragma once

#include <cstdint>

namespace selfattn::emulator {

struct TiledMap {
  uint64_t mark;  // says that the bytes are a map
  const void* address;
  uint64_t sizes[5];
  uint64_t strides[4];  // bytes, of all dimensions but the first
  uint16_t box[5];
  uint8_t rank;
  bool swizzles;  // by 128 bytes
};

// Returns false if the 128 bytes are no map, or are not aligned as a map is.
bool read_tiled_map(const void* bytes, TiledMap& map);

}  // namespace selfattn::emulator
