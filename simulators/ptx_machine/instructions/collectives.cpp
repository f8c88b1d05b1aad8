// Executes what lanes of a warp do together, and barriers of the block.
#include <algorithm>

#include "execute/races.h"
#include "instructions/choosers.h"
#include "instructions/lanes.h"

namespace ptx_machine {

namespace {

enum class Shuffle : u8 { kUp, kDown, kXor, kIndex };

// operands: result, whether the source is in range, a, b, c, members
void shuffle(Warp& warp, const Instruction& ins, u32 mask) {
  const u32 *a = warp.source<u32>(ins, 2), *b = warp.source<u32>(ins, 3), *c = warp.source<u32>(ins, 4);
  const u32* members = warp.source<u32>(ins, kMembers);
  u32 values[kLanes], in_range = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    const int segment = static_cast<int>(c[l] >> 8 & 31), clamp = static_cast<int>(c[l] & 31);
    const int offset = static_cast<int>(b[l] & 31);
    const int bound = (l & segment) | (clamp & ~segment);
    int from = l;
    bool inside = false;
    switch (static_cast<Shuffle>(ins.variant)) {
      case Shuffle::kUp:
        from = l - offset;
        inside = from >= bound;
        break;
      case Shuffle::kDown:
        from = l + offset;
        inside = from <= bound;
        break;
      case Shuffle::kXor:
        from = l ^ offset;
        inside = from <= bound;
        break;
      case Shuffle::kIndex:
        from = (l & segment) | (offset & ~segment);
        inside = from <= bound;
        break;
    }
    if (!inside) from = l;
    if (!on(members[l], from) || !on(mask, from)) {
      fail(warp, ins, 1u << l, "shfl reads lane " + std::to_string(from) + ", which takes no part");
    }
    values[l] = a[from];
    in_range |= static_cast<u32>(inside) << l;
  }
  if (ins.operands[0] != kNoOperand) {
    u32* d = warp.target<u32>(ins, 0);
    for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? values[l] : d[l];
  }
  warp.set_predicate(ins.operands[1], in_range, mask);
}

enum class Vote : u8 { kAll, kAny, kSame, kBallot };

void vote(Warp& warp, const Instruction& ins, u32 mask) {
  const u32 votes = warp.predicate(ins.operands[1]) & mask;
  const auto how = static_cast<Vote>(ins.variant);
  if (how == Vote::kBallot) {
    u32* d = warp.target<u32>(ins, 0);
    for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? votes : d[l];
    return;
  }
  const bool all = votes == mask, none = votes == 0;
  const bool result = how == Vote::kAll ? all : how == Vote::kAny ? !none : all || none;
  warp.set_predicate(ins.operands[0], result ? kWholeWarp : 0, mask);
}

enum class Reduction : u8 { kAdd, kMinimum, kMaximum, kAnd, kOr, kXor };

template <class T>
void reduce(Warp& warp, const Instruction& ins, u32 mask) {
  const T* a = warp.source<T>(ins, 1);
  T result = a[first_lane(mask)];
  for (u32 rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
    const T value = a[first_lane(rest)];
    switch (static_cast<Reduction>(ins.variant)) {
      case Reduction::kAdd:
        result = static_cast<T>(static_cast<u32>(result) + static_cast<u32>(value));
        break;
      case Reduction::kMinimum:
        result = std::min(result, value);
        break;
      case Reduction::kMaximum:
        result = std::max(result, value);
        break;
      case Reduction::kAnd:
        result &= value;
        break;
      case Reduction::kOr:
        result |= value;
        break;
      case Reduction::kXor:
        result ^= value;
        break;
    }
  }
  T* d = warp.target<T>(ins, 0);
  for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? result : d[l];
}

// Elects the first of the members: all get its number, and it alone gets the predicate.
void elect(Warp& warp, const Instruction& ins, u32 mask) {
  const int leader = first_lane(mask);
  if (ins.operands[0] != kNoOperand) {
    u32* d = warp.target<u32>(ins, 0);
    for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? static_cast<u32>(leader) : d[l];
  }
  warp.set_predicate(ins.operands[1], 1u << leader, mask);
}

void active_mask(Warp& warp, const Instruction& ins, u32 mask) {
  u32* d = warp.target<u32>(ins, 0);
  for (int l = 0; l < kLanes; ++l) d[l] = on(mask, l) ? mask : d[l];
}

void synchronise_warp(Warp& warp, const Instruction&, u32 mask) {
  if (warp.block->races != nullptr) warp.block->races->synchronise_lanes(warp, mask);
}

void nothing(Warp&, const Instruction&, u32) {}  // Warp::run() executes barriers

bool choose_shuffle(Statement& statement) {
  Instruction& ins = statement.instruction;
  ins.variant = static_cast<u8>(statement.which({"up", "down", "bfly", "idx"}, 3));
  const Operand& result = statement.operands.at(0);
  const bool two = result.kind == Operand::Kind::kList;
  ins.operands[0] = two ? result.list.at(0).at : result.at;
  if (two) ins.operands[1] = statement.predicate(result.list.at(1));
  for (size_t n = 1; n < 5; ++n) {
    ins.operands[1 + n] = statement.builder.source(statement.operands.at(n), 32);
  }
  ins.handler = &shuffle;
  return true;
}

bool choose_election(Statement& statement) {
  Instruction& ins = statement.instruction;
  const auto& results = statement.operands.at(0).list;
  if (results.size() != 2) return false;
  ins.operands[0] = results[0].at;
  ins.operands[1] = statement.predicate(results[1]);
  ins.operands[kMembers] = statement.builder.source(statement.operands.at(1), 32);
  ins.handler = &elect;
  return true;
}

bool choose_vote(Statement& statement) {
  Instruction& ins = statement.instruction;
  ins.variant = static_cast<u8>(statement.which({"all", "any", "uni", "ballot"}, 3));
  ins.operands[0] = statement.operands.at(0).at;
  ins.operands[1] = statement.predicate(statement.operands.at(1));
  ins.operands[kMembers] = statement.builder.source(statement.operands.at(2), 32);
  ins.handler = &vote;
  return true;
}

bool choose_reduction(Statement& statement) {
  Instruction& ins = statement.instruction;
  const std::string& type = statement.type();
  const int which = statement.which({"add", "min", "max", "and", "or", "xor"});
  if (which < 0 || (type != "u32" && type != "s32" && type != "b32")) return false;
  ins.variant = static_cast<u8>(which);
  statement.target(32);
  statement.source(1, 32);
  ins.operands[kMembers] = statement.builder.source(statement.operands.at(2), 32);
  ins.handler = type == "s32" ? &reduce<s32> : &reduce<u32>;
  return true;
}

}  // namespace

bool choose_collective(Statement& statement) {
  if (statement.name() == "activemask") {
    statement.target(32);
    statement.instruction.handler = &active_mask;
    return true;
  }
  if (!statement.has("sync")) return false;
  statement.instruction.kind = Kind::kSomeLanes;
  if (statement.name() == "shfl") return choose_shuffle(statement);
  if (statement.name() == "elect") return choose_election(statement);
  return statement.name() == "vote" ? choose_vote(statement) : choose_reduction(statement);
}

// operands: the barrier, the number of threads or none, the result, the vote; variant: BarrierKind
bool choose_barrier(Statement& statement) {
  Instruction& ins = statement.instruction;
  const auto& operands = statement.operands;
  if (statement.has("warp")) {
    ins.kind = Kind::kSomeLanes;
    ins.operands[kMembers] = statement.builder.source(operands.at(0), 32);
    ins.handler = &synchronise_warp;
    return true;
  }
  ins.kind = Kind::kBarrier;
  ins.handler = &nothing;
  const bool reduces = statement.has("red");
  size_t next = 0;
  if (reduces) {
    ins.variant =
        static_cast<u8>(BarrierKind::kAnd) + static_cast<u8>(statement.which({"and", "or", "popc"}, 2));
    const bool counts = static_cast<BarrierKind>(ins.variant) == BarrierKind::kCount;
    ins.operands[2] = counts ? operands.at(0).at : statement.predicate(operands.at(0));
    ins.operands[3] = statement.predicate(operands.back());
    next = 1;
  } else if (statement.has("arrive")) {
    ins.variant = static_cast<u8>(BarrierKind::kArrive);
  } else if (!statement.has("sync")) {
    return false;
  }
  ins.operands[0] = statement.builder.source(operands.at(next), 32);
  const size_t end = operands.size() - (reduces ? 1 : 0);
  if (next + 1 < end) ins.operands[1] = statement.builder.source(operands[next + 1], 32);
  return true;
}

}  // namespace ptx_machine
