// Lets the lanes of a warp diverge and meet again, as independent threads do. Of those that can run, the
// lanes where the code is earliest are chosen, so that the lanes of an if meet after it.
#include "execute/warp.h"

#include <algorithm>

namespace ptx_machine {

void Warp::park(u32 lanes, u32 at) {
  parked |= lanes;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) lane_pc[first_lane(rest)] = at;
}

void Warp::reschedule() {
  if (current != 0) park(current, pc);
  current = 0;
  u32 earliest = ~0u;
  for (u32 rest = parked & ~(waiting | polling); rest != 0; rest &= rest - 1) {
    earliest = std::min(earliest, lane_pc[first_lane(rest)]);
  }
  next_pc = ~0u;
  if (earliest == ~0u) return;
  pc = earliest;
  for (u32 rest = parked; rest != 0; rest &= rest - 1) {
    const int l = first_lane(rest);
    if (lane_pc[l] == pc) current |= 1u << l;
    if (lane_pc[l] > pc) next_pc = std::min(next_pc, lane_pc[l]);
  }
  parked &= ~current;
  waiting &= ~current;
  polling &= ~current;
}

bool Warp::all_poll() {
  if (current != 0 || polling == 0) return false;
  state = State::kGaveWay;
  return true;
}

void Warp::look_again() {
  state = State::kRunning;
  waits_for.clear();
  polling = 0;
  if (current == 0) reschedule();
}

bool Warp::together(const Instruction& instruction, u32 needed) {
  if ((current & needed) == needed) return true;
  const u32 here = current;
  park(here, pc);
  waiting |= here;
  current = 0;
  reschedule();
  if (current != 0 || all_poll()) return false;
  std::string others;
  for (int l = 0; l < kLanes; ++l) {
    if (!on(parked & ~here, l)) continue;
    others += "; lane " + std::to_string(l) + " waits at " +
              place_text(*block->kernel, block->kernel->code[lane_pc[l]]);
    break;
  }
  fail(*this, instruction, here, "lanes " + lanes_text(needed & ~here) + " never come" + others);
}

void Warp::branch(const Instruction& instruction, u32 mask) {
  if (mask == 0) {
    ++pc;
  } else if (mask == current) {
    pc = instruction.target;
    if (parked != 0) reschedule();
  } else {
    park(mask, instruction.target);
    park(current & ~mask, pc + 1);
    current = 0;
    reschedule();
  }
}

void Warp::branch_by_table(const Instruction& instruction, u32 mask) {
  const u32* index = source<u32>(instruction, 0);
  const auto& table = block->kernel->tables[instruction.target];
  park(current & ~mask, pc + 1);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int l = first_lane(rest);
    if (index[l] >= table.size()) fail(*this, instruction, 1u << l, "a brx beyond its table");
    park(1u << l, table[index[l]]);
  }
  current = 0;
  reschedule();
}

bool Warp::end(const Instruction& instruction, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    if (copies[first_lane(rest)].empty()) continue;
    fail(*this, instruction, rest & -rest, "a thread ends while its asynchronous copies are on their way");
  }
  products.end(*this, instruction, mask);
  alive &= ~mask;
  current &= ~mask;
  if (current != 0) {
    ++pc;
    return true;
  }
  waiting = 0;  // those that wait may have waited for these: they look again
  reschedule();
  if (current == 0 && !all_poll()) state = State::kDone;
  return current != 0;
}

bool Warp::arrive(const Instruction& instruction, u32 mask) {
  if (mask == 0) {
    ++pc;
    return true;
  }
  if (mask != current) fail(*this, instruction, current, "a barrier for some lanes of a warp");
  if (!together(instruction, alive)) return state == State::kRunning;
  const int lane = first_lane(current);
  barrier = &instruction;
  barrier_number = source<u32>(instruction, 0)[lane];
  barrier_threads = instruction.operands[1] == kNoOperand ? 0 : source<u32>(instruction, 1)[lane];
  if (barrier_number >= kBarriers || barrier_threads % kLanes != 0) {
    fail(*this, instruction, current, "a barrier that there is not, or for a part of a warp");
  }
  votes = predicate(instruction.operands[3]) & alive;
  state = State::kAtBarrier;
  ++pc;
  return false;
}

void Warp::whole_warp(const Instruction& instruction, u32 mask) {
  if (alive != kWholeWarp || mask != current) {
    fail(*this, instruction, mask, "an .aligned instruction without all lanes of the warp");
  }
  if (!together(instruction, kWholeWarp)) return;
  instruction.handler(*this, instruction, mask);
  if (polling == 0) {
    ++pc;
  } else {
    state = State::kGaveWay;
  }
}

// Lanes that wait in vain are parked behind the instruction, until the others of the warp have stopped.
void Warp::test(const Instruction& instruction, u32 mask) {
  const u32 before = polling;
  if (mask != 0) instruction.handler(*this, instruction, mask);
  ++pc;
  const u32 gone = polling & ~before;
  if (gone == 0) return;
  park(gone, pc);
  current &= ~gone;
  if (current != 0) return;
  --instruction.executed;  // how often warps look in vain says nothing of a device
  reschedule();
  all_poll();
}

void Warp::some_lanes(const Instruction& instruction, u32 mask) {
  if (mask == 0) {
    ++pc;
    return;
  }
  if (mask != current) {  // the others go on behind it
    park(current & ~mask, pc + 1);
    next_pc = std::min(next_pc, pc + 1);
    current = mask;
  }
  const u32* members = source<u32>(instruction, kMembers);
  const u32 needed = those_who_meet(instruction, mask, members);
  if (needed & ~alive) {
    fail(*this, instruction, mask, "lanes " + lanes_text(needed & ~alive) + ", which take part, have ended");
  }
  if (!together(instruction, needed)) return;
  const u32 others = current & ~needed;  // they come to the same place with masks of their own
  current = needed;
  instruction.handler(*this, instruction, current);
  if (others != 0) park(others, pc);
  ++pc;
  if (others != 0) reschedule();
}

u32 Warp::those_who_meet(const Instruction& instruction, u32 mask, const u32* members) const {
  u32 found = 0;
  for (u32 rest = mask; rest != 0;) {
    const int l = first_lane(rest);
    if (!on(members[l], l)) fail(*this, instruction, 1u << l, "a mask of members that leaves out the lane");
    const u32 group = members[l] & mask;
    for (u32 other = group; other != 0; other &= other - 1) {
      if (members[first_lane(other)] == members[l]) continue;
      fail(*this, instruction, group, "a mask of members that differs between them");
    }
    if (found == 0 && group == members[l]) found = group;
    rest &= ~group;
  }
  return found != 0 ? found : members[first_lane(mask)];
}

void Warp::run() {
  const Instruction* const code = block->kernel->code.data();
  while (true) {
    const Instruction& instruction = code[pc];
    ++instruction.executed;
    u32 mask = current;
    if (instruction.guard != kNoOperand) {
      const u32 guard = predicates[instruction.guard];
      mask &= instruction.guard_negated ? ~guard : guard;
    }
    if (instruction.touched_count != 0 && mask != 0) products.touch(*this, instruction, mask);
    switch (instruction.kind) {
      case Kind::kPlain:
        if (mask != 0) instruction.handler(*this, instruction, mask);
        ++pc;
        break;
      case Kind::kBranch:
        branch(instruction, mask);
        break;
      case Kind::kBranchTable:
        branch_by_table(instruction, mask);
        break;
      case Kind::kExit:
        if (!end(instruction, mask)) return;
        break;
      case Kind::kBarrier:
        if (!arrive(instruction, mask)) return;
        break;
      case Kind::kWholeWarp:
        whole_warp(instruction, mask);
        if (state != State::kRunning) return;
        break;
      case Kind::kSomeLanes:
        some_lanes(instruction, mask);
        if (state != State::kRunning) return;
        break;
      case Kind::kTest:
        test(instruction, mask);
        if (state != State::kRunning) return;
        break;
    }
    if (pc == next_pc) reschedule();
  }
}

}  // namespace ptx_machine
