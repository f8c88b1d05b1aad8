// What kind of work an instruction is, for counts: by the unit of a device that does it.
#pragma once

#include "types.h"

namespace ptx_machine {

struct Statement;

enum class InstructionClass : u8 {
  kOther,          // fences, prefetches, hints
  kMmaBfloat16,    // mma.m16n8k16; a wgmma counts as several of them
  kMmaFloat16,     // the same in float16
  kFloat32,        // add, sub, mul, fma
  kFloat32Choice,  // min, max, neg, abs, copysign
  kFloat64,
  kFloat16,     // arithmetic of f16, bf16 and pairs of them
  kInteger,     // arithmetic, logic, shifts, bits, cvt among integers
  kComparison,  // setp, selp, logic of predicates
  kConversion,  // cvt from or to floats
  kSpecial,     // ex2, lg2, rcp, rsqrt, sqrt, tanh, div, of floats
  kMove,        // mov, cvta
  kParameter,   // ld.param of a kernel's parameters
  kLoadMatrix,  // ldmatrix
  kSharedLoad,
  kSharedStore,
  kGlobalLoad,  // generic addresses, too
  kGlobalStore,
  kLocal,  // stacks, arguments of calls
  kAtomic,
  kCopy,      // cp.async, also of boxes
  kCopyWait,  // commit_group, wait_group, mbarrier
  kShuffle,
  kVote,     // vote, redux, activemask
  kBarrier,  // barriers of a block
  kWarpBarrier,
  kBranch,  // ret and exit, too
};
constexpr int kInstructionClasses = static_cast<int>(InstructionClass::kBranch) + 1;

// Returns the name that files of counts have for it: "mma_bfloat16".
const char* class_name(InstructionClass of);

// Returns the class of a statement whose instruction has been chosen.
InstructionClass class_of(const Statement& statement);

}  // namespace ptx_machine
