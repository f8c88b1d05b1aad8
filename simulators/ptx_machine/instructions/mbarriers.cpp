// mbarrier.*, and the fences that copies need. The first operand is the address; comments name the others.
#include <map>

#include "execute/races.h"
#include "instructions/access.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

constexpr u32 kBytes = 8;

// Calls f(lane, offset in shared memory) for each lane.
template <class F>
void for_barriers(Warp& warp, const Instruction& ins, u32 mask, Access access, F&& f) {
  u8* pointers[kLanes];
  MemoryAccess where;
  where.wide = ins.wide;
  where.space = static_cast<Space>(ins.variant);
  where.bytes = kBytes;
  where.access = access;
  where.added = ins.immediate;
  where.is_mbarrier = true;
  resolve(warp, ins, mask, where, pointers);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int l = first_lane(rest);
    f(l, static_cast<u32>(pointers[l] - warp.block->shared));
  }
}

// The operand is the number of arrivals.
void initialise(Warp& warp, const Instruction& ins, u32 mask) {
  const u32* arrivals = warp.source<u32>(ins, 1);
  for_barriers(warp, ins, mask, Access::kWrite, [&](int l, u32 offset) {
    warp.block->mbarriers.initialise(warp, ins, l, offset, arrivals[l]);
  });
}

// count: whether the operand announces bytes.
void arrive(Warp& warp, const Instruction& ins, u32 mask) {
  const u32* bytes = ins.count != 0 ? warp.source<u32>(ins, 1) : nullptr;
  for_barriers(warp, ins, mask, Access::kAtomic, [&](int l, u32 offset) {
    if (bytes != nullptr) warp.block->mbarriers.expect(warp, ins, l, offset, bytes[l]);
    warp.block->mbarriers.arrive(warp, ins, l, offset);
  });
}

// The operands are the parity, and the predicate that says whether its phase has ended.
void test(Warp& warp, const Instruction& ins, u32 mask) {
  const u32* parities = warp.source<u32>(ins, 1);
  u32 ended = 0;
  std::map<u32, u32> seen;  // for each barrier, the lanes that see its phase end
  for_barriers(warp, ins, mask, Access::kAtomic, [&](int l, u32 offset) {
    if (parities[l] > 1) fail(warp, ins, 1u << l, "a parity that is neither 0 nor 1");
    if (warp.block->mbarriers.has_ended(warp, ins, l, offset, parities[l])) {
      ended |= 1u << l;
      seen[offset] |= 1u << l;
    } else {
      warp.wait_for(ins, 1u << l, Awaited::kMbarrier, offset);
    }
  });
  for (const auto& [offset, lanes] : seen) warp.block->mbarriers.see(warp, lanes, offset);
  warp.set_predicate(ins.operands[2], ended, mask);
  warp.give_way(mask & ~ended);
}

void fence_initialisation(Warp& warp, const Instruction&, u32 mask) {
  warp.block->mbarriers.fence(warp, mask);
}

void fence_proxy(Warp& warp, const Instruction&, u32 mask) {
  warp.block->mbarriers.fence(warp, mask);
  if (warp.block->races != nullptr) warp.block->races->fence_proxy(warp, mask);
}

void nothing(Warp&, const Instruction&, u32) {}

}  // namespace

bool choose_mbarrier(Statement& statement) {
  Instruction& ins = statement.instruction;
  const bool shared = statement.has("shared::cta") || statement.has("shared");
  if (!shared || statement.type() != "b64") return false;
  ins.variant = static_cast<u8>(Space::kShared);
  const auto& operands = statement.operands;
  if (statement.has("init")) {
    ins.immediate = statement.address(operands.at(0), 0);
    ins.operands[1] = statement.builder.source(operands.at(1), 32);
    ins.handler = &initialise;
    return true;
  }
  ins.immediate = statement.address(operands.at(1), 0);
  if (statement.has("arrive")) {
    // States are not kept and counts of arrivals are not read, because no kernel uses them.
    ins.count = statement.has("expect_tx") ? 1 : 0;
    if (operands[0].kind != Operand::Kind::kSink || operands.size() != 2u + ins.count) return false;
    if (ins.count != 0) ins.operands[1] = statement.builder.source(operands[2], 32);
    ins.handler = &arrive;
    return true;
  }
  if (!statement.has("parity") || (!statement.has("try_wait") && !statement.has("test_wait"))) return false;
  ins.kind = Kind::kTest;
  ins.operands[2] = statement.predicate(operands[0]);
  ins.operands[1] = statement.builder.source(operands.at(2), 32);
  ins.handler = &test;
  return true;
}

bool choose_fence(Statement& statement) {
  Instruction& ins = statement.instruction;
  ins.handler = statement.has("mbarrier_init")                     ? &fence_initialisation
                : statement.has("proxy") && statement.has("async") ? &fence_proxy
                                                                   : &nothing;
  return true;
}

}  // namespace ptx_machine
