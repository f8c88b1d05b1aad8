#include "launch.h"

#include <stdexcept>
#include <string>

#include "options.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator {

namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("cuda emulator: invalid launch: " + what);
}

std::string text(dim3 shape) {
  return "(" + std::to_string(shape.x) + ", " + std::to_string(shape.y) + ", " + std::to_string(shape.z) +
         ")";
}

}  // namespace

unsigned char* dynamic_shared_memory() { return shared_memory().data(); }

void launch(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void* context), void* context) {
  require(grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535u &&
              grid.z <= 65535u,
          "a grid of " + text(grid));
  require(block.x >= 1 && block.y >= 1 && block.z >= 1 && block.x <= 1024u && block.y <= 1024u &&
              block.z <= 64u && size_t{block.x} * block.y * block.z <= 1024u,
          "a block of " + text(block));
  require(shared_bytes <= shared_memory_limit(options().capability),
          std::to_string(shared_bytes) + " bytes of shared memory on a device of compute capability " +
              std::to_string(options().capability));
  run_grid(grid, block, shared_bytes, body, context);
}

}  // namespace selfattn::emulator
