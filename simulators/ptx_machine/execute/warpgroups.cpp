#include "execute/warpgroups.h"

#include <algorithm>

#include "execute/warp.h"

namespace ptx_machine {

void Warpgroup::execute(Warp& warp, const Instruction& ins, u64 first, u64 second, bool third) {
  u64& executed = executed_[warp.index % kWarpsOfGroup];
  const u64 place = executed - gone_;
  if (place == steps_.size()) {
    steps_.push_back({&ins, first, second, third});
  } else {
    const Step& step = steps_[place];
    if (step.instruction != &ins) {
      fail(warp, ins, kWholeWarp,
           "the warps of a warpgroup must execute this together, and another one has executed " +
               place_text(*warp.block->kernel, *step.instruction));
    }
    if (step.first != first || step.second != second || step.third != third) {
      fail(warp, ins, kWholeWarp, "another warp of the warpgroup has executed this with other operands");
    }
  }
  ++executed;
  while (!steps_.empty() && *std::min_element(std::begin(executed_), std::end(executed_)) > gone_) {
    steps_.pop_front();
    ++gone_;
  }
}

void Warpgroup::end_block(const Block& block) const {
  if (steps_.empty()) return;
  const auto group = static_cast<u32>(this - block.warpgroups.data());
  const u64* const most = std::max_element(std::begin(executed_), std::end(executed_));
  const u64* const least = std::min_element(std::begin(executed_), std::end(executed_));
  const u32 warp = group * kWarpsOfGroup + static_cast<u32>(most - executed_);
  fail(block.warps[warp], *steps_[*least - gone_].instruction, kWholeWarp,
       "the block ends, and warp " +
           std::to_string(group * kWarpsOfGroup + static_cast<u32>(least - executed_)) +
           " of the warpgroup has not executed this");
}

Warpgroup& warpgroup_of(Warp& warp, const Instruction& ins) {
  Block& block = *warp.block;
  const u32 group = warp.index / kWarpsOfGroup;
  if ((group + 1) * kWarpsOfGroup > block.warps.size()) {
    fail(warp, ins, kWholeWarp, "a warpgroup without four warps");
  }
  return block.warpgroups[group];
}

}  // namespace ptx_machine
