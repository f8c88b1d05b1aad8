// Primitives that threads execute together. Each thread publishes its operands and waits; the last to arrive
// computes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "site.h"

namespace selfattn::emulator {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

// The operands of the participating lanes of a warp, by lane; null for the others.
using Operands = std::array<void*, kWarpSize>;

// A primitive that some lanes have reached and others not yet.
struct Meeting {
  Site site;
  uint32_t mask = 0;
  uint32_t arrived = 0;
  Operands operands{};
};

struct Warp {
  // Disjoint groups of lanes may be in different primitives at the same time.
  std::vector<Meeting> meetings;
};

// The barrier of a whole block, with a vote.
struct Barrier {
  int arrived = 0;
  int votes = 0;       // so far in this round
  int last_votes = 0;  // in the round before
};

// Each lane in `mask` calls this. The last one calls compute(operands), which may read and write what the
// operands of all lanes point to, before any lane goes on.
void meet(const Site& site, uint32_t mask, void* operands, void (*compute)(const Operands&));

// Waits for every thread of the block; returns how many of them voted.
int meet_block(const Site& site, bool vote);

}  // namespace selfattn::emulator
