#include "execute/races.h"

#include <algorithm>

namespace ptx_machine {

namespace {

constexpr u32 kWordBytes = 4, kHalfBytes = 2;
constexpr u8 kWholeWord = 0xf;

// Returns which of the `size` bytes from `at` on are touched by an access of `bytes` at `begin`.
u8 bytes_in(u64 at, u32 size, u64 begin, u32 bytes) {
  const u64 first = std::max(at, begin) - at, end = std::min(at + size, begin + bytes) - at;
  return static_cast<u8>((1u << end) - (1u << first));
}

// To be called for reports only: making texts takes longer than all else that is done for a word.
std::string in_shared_memory(u32 word) {
  return "byte " + std::to_string(word * kWordBytes) + " of shared memory";
}

constexpr size_t kMostMbarriers = 128;

}  // namespace

void Races::start_grid() {
  first_of_grid_ = serial_ + 1;
  // Accesses of earlier grids are ordered, so their marks need not be kept.
  constexpr size_t kMostPages = 1 << 14;
  if (pages_.size() <= kMostPages) return;
  pages_.clear();
  last_page_ = nullptr;
}

void Races::start_block(const Block& block) {
  ++serial_;
  warps_ = block.warps.size();
  readers_ = warps_ + block.warpgroups.size();
  actors_ = readers_ + kMostMbarriers;
  words_.resize(std::max<size_t>(words_.size(), block.shared_bytes / kWordBytes + 1));
  reads_.resize(std::max(reads_.size(), words_.size() * readers_));
  knows_.resize(warps_);
  for (size_t n = 0; n < warps_; ++n) {
    knows_[n].reset(actors_, warps_);
    knows_[n].all.epochs[n] = 1;
  }
  lanes_know_.clear();
  lanes_know_.resize(warps_ * kLanes);
  lanes_.resize(std::max(lanes_.size(), warps_));
  earlier_reads_.clear();
  for (Knowledge& brought : barriers_) brought.reset(actors_, warps_);
  mbarriers_.clear();
  mbarriers_.resize(kMostMbarriers);
  initialisations_.resize(kMostMbarriers);
}

Races::Mark Races::mark(const Warp& warp, const Instruction& ins, int lane, u8 bytes, Access access) const {
  Mark mark;
  mark.block = serial_;
  mark.instruction = &ins;
  mark.lanes = 1u << lane;
  mark.epoch = epoch_of(warp);
  mark.step = lanes_[warp.index].step;
  mark.actor = static_cast<u16>(warp.index);
  mark.bytes = bytes;
  mark.atomic = access == Access::kAtomic;
  return mark;
}

bool Races::ordered(const Mark& before, const Warp& warp, int lane) const {
  if (before.block != serial_) return before.block < first_of_grid_;
  if (before.actor == warp.index) {
    return before.epoch < epoch_of(warp) || ordered_in_warp(before, lanes_[warp.index], lane);
  }
  const Knowledge* of_lane = lanes_know_[warp.index * kLanes + static_cast<u32>(lane)].get();
  return covers(knows_[warp.index].all, before) || (of_lane != nullptr && covers(of_lane->all, before));
}

bool Races::ordered_in_warp(const Mark& before, const Lanes& lanes, int lane) const {
  if (before.step < lanes.whole) return true;
  for (u32 rest = before.lanes & ~(1u << lane); rest != 0; rest &= rest - 1) {
    if (before.step >= lanes.comes_after[lane][first_lane(rest)]) return false;
  }
  return true;
}

bool Races::conflicts(const Mark& before, const Mark& now, const Warp& warp, int lane) const {
  return (before.bytes & now.bytes) != 0 && !(before.atomic && now.atomic) && !ordered(before, warp, lane);
}

void Races::report(const Warp& warp, const Instruction& ins, int lane, const std::string& where,
                   const Mark& before, const char* what) const {
  const bool same_block = before.block == serial_;
  fail(warp, ins, 1u << lane,
       "race on " + where + ": nothing orders this and " + what + " by " +
           (same_block ? actor_name(before) : "another block") + " at " +
           place_text(*warp.block->kernel, *before.instruction));
}

// Checks a write of the lane against the reads and the last write of the word.
void Races::check_write(const Warp& warp, const Instruction& ins, int lane, u32 word, const Mark& now) {
  const SharedWord& known = words_[word];
  const auto where = [&] { return in_shared_memory(word); };
  if (conflicts(known.write, now, warp, lane))
    report(warp, ins, lane, where(), known.write, kind_of(known.write));
  for (size_t n = 0; n < readers_; ++n) {
    const Mark& read = reads_[word * readers_ + n];
    if (read.block != serial_) continue;  // it belongs to another block's memory
    if (conflicts(read, now, warp, lane)) report(warp, ins, lane, where(), read, "a read");
  }
  if (earlier_reads_.empty()) return;
  const auto earlier = earlier_reads_.find(word);
  if (earlier == earlier_reads_.end()) return;
  for (const Mark& read : earlier->second) {
    if (conflicts(read, now, warp, lane)) report(warp, ins, lane, where(), read, "a read");
  }
  // An access that comes after this write comes after those reads, too.
  if (now.bytes == kWholeWord) earlier_reads_.erase(earlier);
}

Races::SharedWord& Races::shared_word(u32 word) {
  SharedWord& known = words_[word];
  if (known.block != serial_) known = SharedWord{{}, serial_, 0, false};
  return known;
}

void Races::shared(const Warp& warp, const Instruction& ins, int lane, u32 offset, u32 bytes, Access access) {
  for (u32 word = offset / kWordBytes; word <= (offset + bytes - 1) / kWordBytes; ++word) {
    SharedWord& known = shared_word(word);
    const Mark now = mark(warp, ins, lane, bytes_in(word * kWordBytes, kWordBytes, offset, bytes), access);
    const auto where = [&] { return in_shared_memory(word); };
    if (known.in_flight && (known.write.bytes & now.bytes) != 0) {
      report(warp, ins, lane, where(), known.write, "an asynchronous copy that is on its way");
    }
    if (access != Access::kRead) {
      check_write(warp, ins, lane, word, now);
      known.write = now;
      known.written |= now.bytes;
      continue;
    }
    if ((known.written & now.bytes) != now.bytes) {
      fail(warp, ins, 1u << lane, "a read of " + where() + ", which nobody has written");
    }
    if (conflicts(known.write, now, warp, lane))
      report(warp, ins, lane, where(), known.write, kind_of(known.write));
    Mark& read = reads_[word * readers_ + warp.index];
    const bool same_epoch = read.block == serial_ && read.epoch == now.epoch;
    const Mark before = read;
    read = now;
    if (same_epoch && before.step == now.step) {
      read.lanes |= before.lanes;
      read.bytes |= before.bytes;
    } else if (same_epoch && before.step >= lanes_[warp.index].whole) {
      earlier_reads_[word].push_back(before);
    }
  }
}

void Races::start_copy(const Warp& warp, const Instruction& ins, int lane, u32 offset, u32 bytes) {
  shared(warp, ins, lane, offset, bytes, Access::kWrite);
  for (u32 word = offset / kWordBytes; word < (offset + bytes) / kWordBytes; ++word)
    words_[word].in_flight = true;
}

void Races::finish_copy(const Warp& warp, int lane, u32 offset, u32 bytes) {
  for (u32 word = offset / kWordBytes; word < (offset + bytes) / kWordBytes; ++word) {
    SharedWord& known = words_[word];
    known.in_flight = false;
    known.write = mark(warp, *known.write.instruction, lane, known.write.bytes, Access::kWrite);
  }
}

Races::DeviceHalf& Races::device_half(u64 half) {
  const u64 number = half / kHalvesOfPage;
  if (last_page_ == nullptr || number != last_number_) {
    std::unique_ptr<Page>& page = pages_[number];
    if (page == nullptr) page = std::make_unique<Page>();
    last_page_ = page.get();
    last_number_ = number;
  }
  return last_page_->halves[half % kHalvesOfPage];
}

void Races::device(const Warp& warp, const Instruction& ins, int lane, u64 address, u32 bytes,
                   Access access) {
  for (u64 half = address / kHalfBytes; half <= (address + bytes - 1) / kHalfBytes; ++half) {
    DeviceHalf& known = device_half(half);
    const Mark now = mark(warp, ins, lane, bytes_in(half * kHalfBytes, kHalfBytes, address, bytes), access);
    const auto where = [&] { return "device memory" + describe_memory(address); };
    if (conflicts(known.write, now, warp, lane))
      report(warp, ins, lane, where(), known.write, kind_of(known.write));
    if (access != Access::kRead) {
      const bool other_blocks = known.read_by_blocks && known.read.block >= first_of_grid_;
      if (conflicts(known.read, now, warp, lane) || (other_blocks && (known.read.bytes & now.bytes) != 0)) {
        report(warp, ins, lane, where(), known.read, "a read");
      }
      known.write = now;
      continue;
    }
    const bool in_grid = known.read.block >= first_of_grid_;
    known.read_by_blocks = in_grid && (known.read_by_blocks || known.read.block != serial_);
    const Mark before = known.read;
    known.read = now;
    if (in_grid) known.read.bytes |= before.bytes;
  }
}

void Races::synchronise_lanes(const Warp& warp, u32 mask) {
  Lanes& lanes = lanes_[warp.index];
  ++lanes.step;
  if (mask == kWholeWarp) {
    lanes.whole = lanes.step;
    ++knows_[warp.index].all.epochs[warp.index];
    fold(warp);
    return;
  }
  // All lanes now come after what any of them comes after, and after each other.
  u32 together[kLanes] = {};
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const u32* of_lane = lanes.comes_after[first_lane(rest)];
    for (int l = 0; l < kLanes; ++l) together[l] = std::max(together[l], of_lane[l]);
  }
  for (u32 rest = mask; rest != 0; rest &= rest - 1) together[first_lane(rest)] = lanes.step;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    std::copy(together, together + kLanes, lanes.comes_after[first_lane(rest)]);
  }
  std::unique_ptr<Knowledge>* const known = &lanes_know_[warp.index * kLanes];
  Knowledge all;
  bool any = false;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const std::unique_ptr<Knowledge>& of_lane = known[first_lane(rest)];
    if (of_lane == nullptr) continue;
    if (!any) all.reset(actors_, warps_);
    all.merge(*of_lane);
    any = true;
  }
  for (u32 rest = any ? mask : 0; rest != 0; rest &= rest - 1) {
    known[first_lane(rest)] = std::make_unique<Knowledge>(all);
  }
}

void Races::arrive(const Warp& warp, u32 barrier) {
  fold(warp);
  barriers_[barrier].merge(knows_[warp.index]);
  // Other warps know what this warp did before the barrier, and not what it does from here on.
  const u32 epoch = ++knows_[warp.index].all.epochs[warp.index];
  barriers_[barrier].all.epochs[warp.index] = epoch;
}

void Races::synchronise_warps(const std::vector<Warp*>& warps, u32 barrier) {
  Knowledge& together = barriers_[barrier];
  for (const Warp* warp : warps) arrive(*warp, barrier);
  for (const Warp* warp : warps) knows_[warp->index].merge(together);
  together.reset(actors_, warps_);
}

}  // namespace ptx_machine
