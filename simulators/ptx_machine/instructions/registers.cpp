// setmaxnreg: warps give up registers or take them. immediate: how many registers a thread has then.
#include "execute/warp.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

constexpr u64 kFewest = 24, kMost = 256, kMultiple = 8;

void check(Warp& warp, const Instruction& ins) {
  if (warp.block->kernel->registers_of_thread == 0) {
    fail(warp, ins, kWholeWarp,
         "setmaxnreg in a kernel without .maxntid, whose threads have unknown registers");
  }
}

void give_up(Warp& warp, const Instruction& ins, u32) {
  check(warp, ins);
  const auto kept = static_cast<u32>(ins.immediate);
  if (kept > warp.owned_registers) {
    fail(warp, ins, kWholeWarp,
         "a thread that has " + std::to_string(warp.owned_registers) + " registers cannot keep " +
             std::to_string(kept));
  }
  warpgroup_of(warp, ins).execute(warp, ins);
  warp.block->free_registers += (warp.owned_registers - kept) * kLanes;
  warp.owned_registers = kept;
  ++warp.block->events;
}

void take(Warp& warp, const Instruction& ins, u32) {
  check(warp, ins);
  const auto wanted = static_cast<u32>(ins.immediate);
  if (wanted < warp.owned_registers) {
    fail(warp, ins, kWholeWarp,
         "a thread that has " + std::to_string(warp.owned_registers) + " registers cannot grow to " +
             std::to_string(wanted));
  }
  const u32 more = (wanted - warp.owned_registers) * kLanes;
  if (more > warp.block->free_registers) {
    warp.wait_for(ins, kWholeWarp, Awaited::kRegisters);
    warp.give_way(kWholeWarp);
    return;
  }
  warpgroup_of(warp, ins).execute(warp, ins);
  warp.block->free_registers -= more;
  warp.owned_registers = wanted;
  ++warp.block->events;
}

}  // namespace

bool choose_registers(Statement& statement) {
  Instruction& ins = statement.instruction;
  const bool takes = statement.has("inc");
  if (!statement.has("sync") || !statement.has("aligned") || (!takes && !statement.has("dec"))) return false;
  const u64 count = statement.operands.at(0).value;
  if (count < kFewest || count > kMost || count % kMultiple != 0) return false;
  ins.kind = Kind::kWholeWarp;
  ins.immediate = static_cast<s64>(count);
  ins.handler = takes ? &take : &give_up;
  return true;
}

}  // namespace ptx_machine
