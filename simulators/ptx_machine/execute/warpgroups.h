// What the four warps of a warpgroup must do alike: wgmma and setmaxnreg are for all of them.
//
// Warps do not wait for each other here, because devices do not promise that they would. Each warp's sequence
// of such instructions is compared with that of the first warp to execute them, and none may be missing at
// the end.
#pragma once

#include <deque>

#include "types.h"

namespace ptx_machine {

struct Block;
struct Instruction;
struct Warp;

constexpr u32 kWarpsOfGroup = 4;

class Warpgroup {
 public:
  // The warp executes the instruction with these operands, which must be those of the other warps.
  void execute(Warp& warp, const Instruction& ins, u64 first = 0, u64 second = 0, bool third = false);
  // Reports instructions that only some of the warps have executed.
  void end_block(const Block& block) const;

 private:
  struct Step {
    const Instruction* instruction;
    u64 first, second;
    bool third;
  };
  std::deque<Step> steps_;  // instructions that some warp has not executed yet
  u64 gone_ = 0;            // how many came before them
  u64 executed_[kWarpsOfGroup] = {};
};

// Returns a warp's warpgroup; reports one that is not complete.
Warpgroup& warpgroup_of(Warp& warp, const Instruction& ins);

}  // namespace ptx_machine
