// Where the lanes of an instruction access memory.
#pragma once

#include "execute/warp.h"

namespace ptx_machine {

enum class Access : u8 { kRead, kWrite, kAtomic };

// An access of `bytes` by each lane of the mask: operand `place` is the register of its address, to which
// `added` is added. Checks bounds and alignment, and has races looked for; throws a report.
struct MemoryAccess {
  int place = 0;
  bool wide = false;  // the register has 64 bits
  Space space = Space::kGeneric;
  u32 bytes = 0;
  Access access = Access::kRead;
  s64 added = 0;
  bool is_copy = false;      // asynchronous: races.h is told by who copies
  bool is_mbarrier = false;  // by no loads and stores: no bank conflicts
};

void resolve(Warp& warp, const Instruction& ins, u32 mask, const MemoryAccess& access,
             u8* (&pointers)[kLanes]);

}  // namespace ptx_machine
