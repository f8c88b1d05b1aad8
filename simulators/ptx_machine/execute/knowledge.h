// What the race detector knows to come before what a warp or a lane does next.
#pragma once

#include <algorithm>
#include <vector>

#include "types.h"

namespace ptx_machine {

// Counts by actor: warps; the products of each warpgroup; the copies of each mbarrier. The clock comes after
// what an actor did in earlier epochs than its count here, and after what a lane of a warp did in earlier
// steps.
struct Clock {
  std::vector<u32> epochs;  // for each actor
  std::vector<u32> steps;   // for each lane of each warp

  void reset(size_t actors, size_t warps) {
    epochs.assign(actors, 0);
    steps.assign(warps * kLanes, 0);
  }
  void merge(const Clock& other) {
    for (size_t n = 0; n < epochs.size(); ++n) epochs[n] = std::max(epochs[n], other.epochs[n]);
    for (size_t n = 0; n < steps.size(); ++n) steps[n] = std::max(steps[n], other.steps[n]);
  }
};

struct Knowledge {
  Clock all;
  Clock fenced;  // what a fence of proxies comes after, and with it asynchronous reads and writes

  void reset(size_t actors, size_t warps) {
    all.reset(actors, warps);
    fenced.reset(actors, warps);
  }
  void merge(const Knowledge& other) {
    all.merge(other.all);
    fenced.merge(other.fenced);
  }
};

}  // namespace ptx_machine
