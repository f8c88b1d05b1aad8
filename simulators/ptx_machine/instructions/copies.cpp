// Executes cp.async. operands: the destination, the source, how many bytes to read or none; count: how many
// to write; immediate and target: what is added to both addresses.
#include "execute/races.h"
#include "instructions/access.h"
#include "instructions/choosers.h"
#include "options.h"

namespace ptx_machine {

namespace {

constexpr u8 kUnwritten = 0xff;  // NaN
constexpr s64 kAll = -1;

void finish(const Copy& copy, u8* shared) {
  std::memcpy(shared + copy.to, copy.from, copy.read);
  std::memset(shared + copy.to + copy.read, 0, copy.bytes - copy.read);
}

void start(Warp& warp, const Instruction& ins, u32 mask) {
  const u32* sizes = ins.operands[2] == kNoOperand ? nullptr : warp.source<u32>(ins, 2);
  u32 reading = 0;  // lanes that read; other lanes' addresses need not be valid
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    if (sizes != nullptr && sizes[l] > ins.count)
      fail(warp, ins, 1u << l, "cp.async reads more than it writes");
    if (sizes == nullptr || sizes[l] > 0) reading |= 1u << l;
  }
  u8 *to[kLanes], *from[kLanes];
  MemoryAccess access;
  access.bytes = ins.count;
  access.is_copy = true;
  if (reading != 0) {
    access.place = 1;
    access.wide = true;
    access.space = Space::kGlobal;
    access.added = static_cast<s32>(ins.target);
    resolve(warp, ins, reading, access, from);
  }
  access.place = 0;
  access.wide = ins.wide;
  access.space = Space::kShared;
  access.access = Access::kWrite;
  access.added = ins.immediate;
  resolve(warp, ins, mask, access, to);
  Block& block = *warp.block;
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    const bool reads = on(reading, l);
    const auto offset = static_cast<u32>(to[l] - block.shared);
    const u32 read = !reads ? 0 : sizes != nullptr ? sizes[l] : ins.count;
    const Copy copy{offset, ins.count, read, reads ? from[l] : to[l], warp.closed_groups[l]};
    if (block.races != nullptr) block.races->start_copy(warp, ins, l, offset, ins.count);
    if (options().late_copies) {
      std::memset(to[l], kUnwritten, ins.count);
    } else {
      finish(copy, block.shared);
    }
    warp.copies[l].push_back(copy);
  }
}

void commit(Warp& warp, const Instruction&, u32 mask) {
  for (int l = 0; l < kLanes; ++l) warp.closed_groups[l] += on(mask, l) ? 1 : 0;
}

// immediate: how many of the newest groups may be on their way; with kAll not even copies without a group may
// be.
void wait(Warp& warp, const Instruction& ins, u32 mask) {
  Block& block = *warp.block;
  for (int l = 0; l < kLanes; ++l) {
    if (!on(mask, l)) continue;
    std::vector<Copy>& copies = warp.copies[l];
    size_t kept = 0;
    for (const Copy& copy : copies) {
      const u32 closed = warp.closed_groups[l];
      const bool waited_for = copy.group < closed && copy.group + static_cast<u64>(ins.immediate) < closed;
      if (ins.immediate != kAll && !waited_for) {
        copies[kept++] = copy;
        continue;
      }
      if (options().late_copies) finish(copy, block.shared);
      if (block.races != nullptr) block.races->finish_copy(warp, l, copy.to, copy.bytes);
    }
    copies.resize(kept);
  }
}

bool choose_start(Statement& statement) {
  Instruction& ins = statement.instruction;
  if (!statement.has("global") || statement.space() == Space::kGeneric || statement.operands.size() > 4)
    return false;
  ins.immediate = statement.address(statement.operands.at(0), 0);
  ins.target = static_cast<u32>(statement.address(statement.operands.at(1), 1));
  const Operand& from = statement.operands[1];
  if (from.list.empty() || from.list[0].bits != 64) return false;
  ins.count = static_cast<u8>(statement.operands.at(2).value);
  if (statement.has("cg") ? ins.count != 16 : ins.count != 4 && ins.count != 8 && ins.count != 16)
    return false;
  if (statement.operands.size() > 3) ins.operands[2] = statement.builder.source(statement.operands[3], 32);
  ins.handler = &start;
  return true;
}

}  // namespace

bool choose_copy(Statement& statement) {
  Instruction& ins = statement.instruction;
  if (statement.has("async") && statement.has("bulk")) return choose_box_copy(statement);
  if (!statement.has("async") || statement.has("mbarrier")) return false;
  if (statement.has("commit_group")) {
    ins.handler = &commit;
  } else if (statement.has("wait_group") || statement.has("wait_all")) {
    ins.handler = &wait;
    ins.immediate = statement.has("wait_all") ? kAll : static_cast<s64>(statement.operands.at(0).value);
  } else {
    return choose_start(statement);
  }
  return true;
}

}  // namespace ptx_machine
