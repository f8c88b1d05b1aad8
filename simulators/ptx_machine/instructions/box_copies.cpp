// cp.async.bulk.tensor: copies of boxes, from device to shared memory. operands: the destination, the tensor
// map, the mbarrier, the coordinates, innermost first; immediate and target: what is added to the first two
// addresses; count: the number of coordinates.
#include <cstdio>

#include "execute/counts.h"
#include "execute/races.h"
#include "instructions/access.h"
#include "instructions/choosers.h"

namespace ptx_machine {

namespace {

constexpr int kFirstCoordinate = 3;
constexpr u32 kSwizzleBytes = 128, kPatternBytes = 1024;

TensorMap read_map(Warp& warp, const Instruction& ins, int lane) {
  const u64 window = warp.source<u64>(ins, 1)[lane] & ~(kWindowBytes - 1);
  if (window == kLocalWindow || window == kSharedWindow) {
    fail(warp, ins, 1u << lane,
         "a tensor map in memory of threads: a kernel's parameter must be const and __grid_constant__");
  }
  u8 bytes[TensorMap::kBytes];
  MemoryAccess access;
  access.place = 1;
  access.wide = true;
  access.bytes = TensorMap::kAlignment;
  for (int half = 0; half < TensorMap::kBytes / TensorMap::kAlignment; ++half) {
    u8* pointers[kLanes];
    access.added = static_cast<s32>(ins.target) + half * TensorMap::kAlignment;
    resolve(warp, ins, 1u << lane, access, pointers);
    std::memcpy(bytes + half * TensorMap::kAlignment, pointers[lane], TensorMap::kAlignment);
  }
  TensorMap map;
  std::memcpy(&map, bytes, sizeof map);
  if (!map.is_one()) fail(warp, ins, 1u << lane, "the tensor map of a copy is not one");
  if (map.dimensions != ins.count) {
    fail(warp, ins, 1u << lane,
         "a copy with " + std::to_string(ins.count) + " coordinates by a tensor map of " +
             std::to_string(map.dimensions) + " dimensions");
  }
  return map;
}

u32 offset_of(Warp& warp, const Instruction& ins, int lane, int place, s64 added, u32 bytes) {
  MemoryAccess access;
  access.place = place;
  access.wide = place == 0 && ins.wide;
  access.space = Space::kShared;
  access.bytes = bytes;
  access.access = Access::kWrite;
  access.added = added;
  access.is_copy = access.is_mbarrier = true;
  u8* pointers[kLanes];
  resolve(warp, ins, 1u << lane, access, pointers);
  return static_cast<u32>(pointers[lane] - warp.block->shared);
}

void check_target(Warp& warp, const Instruction& ins, const BoxCopy& copy) {
  const u32 shared = warp.block->shared_bytes, lane = 1u << copy.lane;
  if (copy.map.swizzled) {
    if (copy.map.row_bytes() != kSwizzleBytes) {
      fail(warp, ins, lane, "a swizzled box without rows of 128 bytes, which this machine does not know");
    }
    if ((copy.to + kSharedBase) % kPatternBytes != 0) {
      fail(warp, ins, lane,
           "a swizzled box goes to byte " + std::to_string(copy.to) +
               " of shared memory, where its pattern of 1024 bytes does not begin");
    }
  }
  if (copy.to + u64{copy.bytes()} > shared) {
    fail(warp, ins, lane,
         "a box of " + std::to_string(copy.bytes()) + " bytes at byte " + std::to_string(copy.to) +
             " is outside of the " + std::to_string(shared) + " bytes of shared memory");
  }
}

void check_source(Warp& warp, const Instruction& ins, const BoxCopy& copy) {
  u64 bytes = 0;
  copy.for_rows([&](u32 row, u64 address, u32, u32 read) {
    Range range;
    if (read == 0) return;
    bytes += read;
    if (!find_memory(address, &range) || address + read > range.end) {
      char text[32];
      std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
      fail(warp, ins, 1u << copy.lane,
           "row " + std::to_string(row) + " of a box, " + std::to_string(read) + " bytes at " + text +
               ", is outside of device memory" + describe_memory(address));
    }
    if (warp.block->counts != nullptr) warp.block->counts->box_row(address, read);
    if (warp.block->races == nullptr) return;
    warp.block->races->device(warp, ins, copy.lane, address, read, Access::kRead);
  });
  if (warp.block->counts != nullptr) warp.block->counts->box(bytes);
}

void start(Warp& warp, const Instruction& ins, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    BoxCopy copy;
    copy.warp = &warp;
    copy.instruction = &ins;
    copy.lane = first_lane(rest);
    copy.map = read_map(warp, ins, copy.lane);
    copy.to = offset_of(warp, ins, copy.lane, 0, ins.immediate, kSwizzleBytes);
    copy.barrier = offset_of(warp, ins, copy.lane, 2, 0, sizeof(u64));
    for (int n = 0; n < ins.count; ++n) {
      copy.coordinates[n] = warp.source<s32>(ins, kFirstCoordinate + n)[copy.lane];
    }
    check_target(warp, ins, copy);
    check_source(warp, ins, copy);
    warp.block->mbarriers.start(copy);
  }
}

}  // namespace

bool choose_box_copy(Statement& statement) {
  Instruction& ins = statement.instruction;
  const bool known = statement.has("tensor") && statement.has("shared::cluster") && statement.has("global") &&
                     statement.has("tile") && statement.has("mbarrier::complete_tx::bytes") &&
                     statement.operands.size() == 3;
  if (!known) return false;
  const Operand &to = statement.operands[0], &from = statement.operands[1], &barrier = statement.operands[2];
  if (from.list.size() != 2 || from.list[0].bits != 64 || from.list[1].kind != Operand::Kind::kList)
    return false;
  const auto& coordinates = from.list[1].list;
  if (coordinates.empty() || coordinates.size() > TensorMap::kMostDimensions) return false;
  ins.immediate = statement.address(to, 0);
  ins.target = static_cast<u32>(statement.address(from, 1));
  if (barrier.list.empty() || barrier.list[0].bits != 32 || statement.address(barrier, 2) != 0) return false;
  ins.count = static_cast<u8>(coordinates.size());
  for (size_t n = 0; n < coordinates.size(); ++n) {
    ins.operands[kFirstCoordinate + n] = statement.builder.source(coordinates[n], 32);
  }
  ins.handler = &start;
  return true;
}

}  // namespace ptx_machine
