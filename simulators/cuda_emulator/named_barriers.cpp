#include "named_barriers.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "races.h"
#include "scheduler.h"

namespace selfattn::emulator::named {

namespace {

constexpr int kBarriers = 16;

struct NamedBarrier {
  int threads = 0;  // how many it waits for, as the first warp said
  int arrived = 0;
  uint64_t rounds = 0;  // how many rounds have ended
  Site site;            // where the first warp came
  races::Order arriving;
  races::Order ended;  // what the last round has made known
  std::vector<Thread*> waiting;
};

std::array<NamedBarrier, kBarriers> barriers;

struct Coming {
  int number;
  int threads;
  const Site* site;
  uint64_t round;
};

// Lets the warp arrive; the last of its lanes calls this.
void arrive(const Operands& operands) {
  auto* const mine = static_cast<Coming*>(operands[0]);
  NamedBarrier& barrier = barriers[static_cast<size_t>(mine->number)];
  for (void* operand : operands) {
    auto* const other = static_cast<Coming*>(operand);
    if (other->number != mine->number || other->threads != mine->threads) {
      fail("the warp of " + whereabouts() + " comes to " + to_string(*mine->site) +
           " with different barriers or numbers of threads");
    }
    other->round = barrier.rounds;
  }
  if (barrier.arrived == 0) {
    barrier.threads = mine->threads;
    barrier.site = *mine->site;
  }
  if (barrier.threads != mine->threads) {
    fail(whereabouts() + " comes to barrier " + std::to_string(mine->number) + " in " +
         to_string(*mine->site) + " for " + std::to_string(mine->threads) +
         " threads, while others wait for " + std::to_string(barrier.threads) + " there since " +
         to_string(barrier.site));
  }
  for (int lane = 0; lane < kWarpSize; ++lane)
    races::release(barrier.arriving, self().warp * kWarpSize + lane);
  barrier.arrived += kWarpSize;
  if (barrier.arrived < barrier.threads) return;
  ++barrier.rounds;
  barrier.arrived = 0;
  barrier.ended = std::exchange(barrier.arriving, races::Order());
  for (Thread* thread : std::exchange(barrier.waiting, {})) wake(*thread);
}

}  // namespace

void start_block() { barriers.fill(NamedBarrier()); }

void end_block() {
  for (size_t number = 0; number < kBarriers; ++number) {
    const NamedBarrier& barrier = barriers[number];
    if (barrier.arrived == 0) continue;
    fail("in block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
         std::to_string(blockIdx.z) + ") all threads have ended, and " + std::to_string(barrier.arrived) +
         " of " + std::to_string(barrier.threads) + " have come to barrier " + std::to_string(number) +
         ", the first in " + to_string(barrier.site));
  }
}

void come(int number, int threads, bool waits, const Site& site) {
  if (number < 1 || number >= kBarriers) {
    fail(whereabouts() + " calls " + to_string(site) + " with barrier " + std::to_string(number) +
         "; there are 1 to 15");
  }
  if (threads < kWarpSize || threads % kWarpSize != 0 || threads > static_cast<int>(block().threads.size())) {
    fail(whereabouts() + " calls " + to_string(site) + " for " + std::to_string(threads) + " threads of " +
         std::to_string(block().threads.size()));
  }
  Coming mine{number, threads, &site, 0};
  meet(site, kFullMask, &mine, &arrive);
  if (!waits) return;
  NamedBarrier& barrier = barriers[static_cast<size_t>(number)];
  while (barrier.rounds == mine.round) {
    barrier.waiting.push_back(&self());
    wait(site);
  }
  races::acquire(barrier.ended, self().number);
}

std::string what_barriers_lack() {
  std::string text;
  for (size_t number = 0; number < kBarriers; ++number) {
    const NamedBarrier& barrier = barriers[number];
    if (barrier.arrived == 0) continue;
    text += "\n  " + std::to_string(barrier.arrived) + " of " + std::to_string(barrier.threads) +
            " threads have come to barrier " + std::to_string(number) + ", the first in " +
            to_string(barrier.site);
  }
  return text;
}

}  // namespace selfattn::emulator::named
