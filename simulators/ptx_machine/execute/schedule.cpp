// Runs the warps of a block in turn, from one wait to the next. It has the barriers of the block, and reports
// when no warp can go on or when something is left behind.
#include <algorithm>
#include <map>
#include <numeric>

#include "execute/races.h"
#include "execute/warp.h"
#include "options.h"

namespace ptx_machine {

namespace {

// So many rounds without an event mean that there will be none. A warp may look at several mbarriers in turn.
constexpr u32 kMostIdleRounds = 16;

// A barrier that some warps have come to.
struct Waiting {
  std::vector<Warp*> warps;
  u32 threads = 0;
};

void let_go(Block& block, const Waiting& waiting) {
  u32 votes = 0, threads = 0;
  for (const Warp* warp : waiting.warps) {
    votes += static_cast<u32>(count_lanes(warp->votes));
    threads += static_cast<u32>(count_lanes(warp->alive));
  }
  for (Warp* warp : waiting.warps) {
    const u32 result = warp->barrier->operands[2];
    switch (static_cast<BarrierKind>(warp->barrier->variant)) {
      case BarrierKind::kAnd:
        warp->set_predicate(result, votes == threads ? kWholeWarp : 0, warp->alive);
        break;
      case BarrierKind::kOr:
        warp->set_predicate(result, votes > 0 ? kWholeWarp : 0, warp->alive);
        break;
      case BarrierKind::kCount: {
        u32* counts = warp->target<u32>(*warp->barrier, 2);
        for (int l = 0; l < kLanes; ++l) counts[l] = on(warp->alive, l) ? votes : counts[l];
        break;
      }
      default:
        break;
    }
    warp->state = Warp::State::kRunning;
  }
  const u32 number = waiting.warps[0]->barrier_number;
  block.arrived[number] = Block::Arrived();
  if (block.races != nullptr) block.races->synchronise_warps(waiting.warps, number);
}

[[noreturn]] void fail_counts(const Warp& warp) {
  fail(warp, *warp.barrier, warp.alive, "warps come to one barrier with different counts or operations");
}

// Whether the warp has only arrived, and goes on.
bool only_arrives(Block& block, Warp& warp, u32 threads) {
  if (static_cast<BarrierKind>(warp.barrier->variant) != BarrierKind::kArrive) return false;
  Block::Arrived& arrived = block.arrived[warp.barrier_number];
  const u32 expected = warp.barrier_threads != 0 ? warp.barrier_threads : threads;
  if (arrived.threads != 0 && arrived.expected != expected) fail_counts(warp);
  arrived = {arrived.threads + static_cast<u32>(count_lanes(warp.alive)), expected, &warp, warp.barrier};
  if (block.races != nullptr) block.races->arrive(warp, warp.barrier_number);
  warp.state = Warp::State::kRunning;
  return true;
}

// Lets warps go whose barriers are complete; false if there are none.
bool pass_barriers(Block& block, u32 threads) {
  std::map<u32, Waiting> barriers;
  bool passed = false;
  for (Warp& warp : block.warps) {
    if (warp.state != Warp::State::kAtBarrier) continue;
    if (only_arrives(block, warp, threads)) {
      passed = true;
      continue;
    }
    Waiting& waiting = barriers[warp.barrier_number];
    waiting.warps.push_back(&warp);
    waiting.threads += static_cast<u32>(count_lanes(warp.alive));
    const Warp& first = *waiting.warps[0];
    if (warp.barrier_threads != first.barrier_threads || warp.barrier->variant != first.barrier->variant) {
      fail_counts(warp);
    }
  }
  for (u32 number = 0; number < kBarriers; ++number) {
    // All have arrived, and nobody waits: the barrier begins anew.
    Block::Arrived& arrived = block.arrived[number];
    if (arrived.threads == 0 || arrived.threads != arrived.expected || barriers.count(number) != 0) continue;
    arrived = Block::Arrived();
    if (block.races != nullptr) block.races->synchronise_warps({}, number);
  }
  for (auto& [number, waiting] : barriers) {
    const Warp& first = *waiting.warps[0];
    const u32 expected = first.barrier_threads != 0 ? first.barrier_threads : threads;
    const Block::Arrived& arrived = block.arrived[number];
    if (arrived.threads != 0 && arrived.expected != expected) fail_counts(first);
    if (waiting.threads + arrived.threads > expected) {
      fail(first, *first.barrier, first.alive,
           std::to_string(waiting.threads + arrived.threads) + " threads come to barrier " +
               std::to_string(number) + ", which expects " + std::to_string(expected));
    }
    if (waiting.threads + arrived.threads != expected) continue;
    let_go(block, waiting);
    passed = true;
  }
  return passed;
}

std::string names_of(const Block& block, const Warp& warp) {
  if (warp.state == Warp::State::kAtBarrier) return "barrier " + std::to_string(warp.barrier_number);
  std::string text;
  for (const Awaited& awaited : warp.waits_for) {
    if (!text.empty()) text += ", and ";
    if (awaited.what == Awaited::kMbarrier) {
      text += block.mbarriers.describe(awaited.offset) + " (lanes " + lanes_text(awaited.lanes) + ")";
    } else if (awaited.what == Awaited::kRegisters) {
      text += "registers, of which the block has " + std::to_string(block.free_registers) + " left";
    } else {
      text += "products that other warps of its warpgroup have not begun";
    }
  }
  return text;
}

// All that have not ended wait in vain.
[[noreturn]] void fail_in_deadlock(const Block& block) {
  const Warp* first = nullptr;
  std::map<std::string, std::string> waiting;  // what for, and who
  int ended = 0, at_first_barrier = 0;
  bool only_barriers = true;
  for (const Warp& warp : block.warps) {
    if (warp.state == Warp::State::kDone) {
      ++ended;
      continue;
    }
    if (first == nullptr) first = &warp;
    const bool at_barrier = warp.state == Warp::State::kAtBarrier;
    only_barriers = only_barriers && at_barrier;
    if (at_barrier && first->state == warp.state && warp.barrier_number == first->barrier_number) {
      ++at_first_barrier;
    }
    std::string& who = waiting[names_of(block, warp)];
    who += (who.empty() ? "" : ", ") + std::to_string(warp.index);
  }
  const std::string behind = ", and " + std::to_string(ended) + " have ended";
  if (only_barriers) {
    fail(*first, *first->barrier, first->alive,
         "deadlock: " + std::to_string(at_first_barrier) + " of " + std::to_string(block.warps.size()) +
             " warps wait at barrier " + std::to_string(first->barrier_number) + behind);
  }
  std::string text = "deadlock";
  for (const auto& [what, who] : waiting) text += "; warp " + who + " waits for " + what;
  const bool polls = first->state == Warp::State::kGaveWay && !first->waits_for.empty();
  const Instruction& at = polls ? *first->waits_for[0].instruction : *first->barrier;
  fail(*first, at, polls ? first->waits_for[0].lanes : first->alive, text + behind);
}

// One of the mbarriers that are waited for gets what is on its way to it; false if nothing is.
bool bring_copies(Block& block, const std::vector<u32>& order) {
  for (const u32 n : order) {
    const Warp& warp = block.warps[n];
    if (warp.state != Warp::State::kGaveWay) continue;
    for (const Awaited& awaited : warp.waits_for) {
      if (awaited.what == Awaited::kMbarrier && block.mbarriers.bring(block, awaited.offset)) return true;
    }
  }
  return false;
}

void check_end(const Block& block) {
  for (u32 number = 0; number < kBarriers; ++number) {
    const Block::Arrived& arrived = block.arrived[number];
    if (arrived.threads == 0) continue;
    fail(*arrived.warp, *arrived.instruction, arrived.warp->alive,
         "the block ends, and " + std::to_string(arrived.threads) + " of " +
             std::to_string(arrived.expected) + " threads have come to barrier " + std::to_string(number));
  }
  for (const Warpgroup& group : block.warpgroups) group.end_block(block);
  block.mbarriers.end_block();
}

}  // namespace

u32 draw(u64& state, u32 below) {
  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<u32>(state >> 33) % below;
}

void run_warps(Block& block, u32 threads, u64& random_state) {
  std::vector<u32> order(block.warps.size());
  std::iota(order.begin(), order.end(), 0);
  u32 idle = 0;
  while (true) {
    const u64 before = block.events;
    for (auto n = static_cast<u32>(order.size()); options().schedule != 0 && n > 1; --n) {
      std::swap(order[n - 1], order[draw(random_state, n)]);
    }
    for (const u32 n : order) {
      if (block.warps[n].state == Warp::State::kRunning) block.warps[n].run();
    }
    const bool passed = pass_barriers(block, threads);
    const auto has = [&](Warp::State state) {
      return std::any_of(block.warps.begin(), block.warps.end(),
                         [state](const Warp& warp) { return warp.state == state; });
    };
    const bool waiting = has(Warp::State::kGaveWay);
    if (!passed && !waiting) break;
    if (passed || block.events != before || bring_copies(block, order)) {
      idle = 0;
    } else if (++idle > kMostIdleRounds) {
      break;
    }
    for (Warp& warp : block.warps) {
      if (warp.state == Warp::State::kGaveWay) warp.look_again();
    }
  }
  for (const Warp& warp : block.warps) {
    if (warp.state != Warp::State::kDone) fail_in_deadlock(block);
  }
  check_end(block);
}

}  // namespace ptx_machine
