// Accesses of memory by the lanes of an instruction, with their checks.
#pragma once

#include "execute/warp.h"

namespace ptx_machine {

enum class Access : u8 { kRead, kWrite, kAtomic };

// An access of `bytes` by each lane of the mask. Operand `place` is the register of the address, to which
// `added` is added. The access is checked for bounds, alignment and races; what is wrong is thrown as a
// report.
struct MemoryAccess {
  int place = 0;
  bool wide = false;  // whether the register has 64 bits
  Space space = Space::kGeneric;
  u32 bytes = 0;
  Access access = Access::kRead;
  s64 added = 0;
  bool is_copy = false;      // asynchronous copies report their accesses to races.h themselves
  bool is_mbarrier = false;  // mbarriers use no loads and stores, so they have no bank conflicts
};

void resolve(Warp& warp, const Instruction& ins, u32 mask, const MemoryAccess& access,
             u8* (&pointers)[kLanes]);

}  // namespace ptx_machine
