// What CUDA's driver makes of a tensor for copies of boxes, as the emulator's own driver (cuda.h) makes it.
#pragma once

#include <cstdint>

namespace selfattn::emulator {

struct TiledMap {
  uint64_t mark;  // says that this is one
  const void* address;
  uint64_t sizes[5];
  uint64_t strides[4];  // in bytes, of all dimensions but the first
  uint16_t box[5];
  uint8_t rank;
  bool swizzles;  // by 128 bytes
};

// False where the 128 bytes are no map, or are not aligned as one.
bool read_tiled_map(const void* bytes, TiledMap& map);

}  // namespace selfattn::emulator
