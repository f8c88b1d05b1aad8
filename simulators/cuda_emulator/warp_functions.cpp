#include "warp_functions.h"

#include "races.h"
#include "scheduler.h"

namespace selfattn::emulator {

int running_lane() { return self().lane; }

void shuffle(const Operands& operands) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    auto* mine = static_cast<Shuffle*>(operands[static_cast<size_t>(lane)]);
    if (mine == nullptr) continue;
    const auto* source =
        static_cast<const Shuffle*>(operands[static_cast<size_t>(mine->source & (kWarpSize - 1))]);
    if (source == nullptr) {
      fail("in the warp of " + whereabouts() + " lane " + std::to_string(lane) + " shuffles from lane " +
           std::to_string(mine->source) + ", which does not take part");
    }
    mine->result = source->value;
  }
}

void vote(const Operands& operands) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto* mine = static_cast<const Vote*>(operands[static_cast<size_t>(lane)]);
    if (mine != nullptr && mine->value) lanes |= 1u << lane;
  }
  for (void* mine : operands) {
    if (mine != nullptr) static_cast<Vote*>(mine)->result = lanes;
  }
}

void fence(const Operands& operands) {
  std::vector<int> threads;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (operands[static_cast<size_t>(lane)] != nullptr) threads.push_back(self().warp * kWarpSize + lane);
  }
  races::synchronise(threads);
}

}  // namespace selfattn::emulator
