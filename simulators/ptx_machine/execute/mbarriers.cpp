#include "execute/mbarriers.h"

#include <algorithm>

#include "execute/races.h"
#include "execute/warp.h"
#include "options.h"

namespace ptx_machine {

namespace {

constexpr u32 kMostArrivals = (1 << 20) - 1;
constexpr s64 kMostBytes = (1 << 20) - 1;
constexpr u8 kUnwritten = 0xff;  // NaN

std::string name_of(u32 offset) {
  return "the mbarrier at byte " + std::to_string(offset) + " of shared memory";
}

// The swizzle moves chunks of this size.
constexpr u32 kChunk = 16;

u32 place_of(const BoxCopy& copy, u32 byte) {
  const u32 plain = kSharedBase + copy.to + byte;
  return (copy.map.swizzled ? swizzled_by_128(plain) : plain) - kSharedBase;
}

}  // namespace

u64 Mbarrier::word() const {
  return (u64{phase} + 1) * 0x9e3779b97f4a7c15ull ^ u64 { pending } << 40 ^ u64 { arrivals } << 20 ^
         static_cast<u64>(bytes);
}

void Mbarriers::start_block() {
  barriers_.clear();
  copies_.clear();
}

void Mbarriers::end_block() const {
  for (const BoxCopy& copy : copies_) {
    fail(
        *copy.warp, *copy.instruction, 1u << copy.lane,
        "the block ends, and nobody has waited for this copy, whose bytes went to " + describe(copy.barrier));
  }
}

std::string Mbarriers::describe(u32 offset) const {
  const auto found = barriers_.find(offset);
  if (found == barriers_.end()) return name_of(offset);
  const Mbarrier& barrier = found->second;
  std::string text = name_of(offset) + ", in whose phase " + std::to_string(barrier.phase) + " " +
                     std::to_string(barrier.pending) + " of " + std::to_string(barrier.arrivals) +
                     " arrivals and ";
  return text + (barrier.bytes < 0 ? std::to_string(-barrier.bytes) + " bytes too many have come"
                                   : std::to_string(barrier.bytes) + " bytes are missing");
}

void Mbarriers::initialise(Warp& warp, const Instruction& ins, int lane, u32 offset, u32 arrivals) {
  if (arrivals == 0 || arrivals > kMostArrivals) {
    fail(warp, ins, 1u << lane, "an mbarrier for " + std::to_string(arrivals) + " arrivals");
  }
  const auto known = barriers_.find(offset);
  u64 stored = 0;
  std::memcpy(&stored, warp.block->shared + offset, sizeof stored);
  if (known != barriers_.end() && stored == known->second.word()) {
    fail(warp, ins, 1u << lane, name_of(offset) + " is initialised a second time");
  }
  Mbarrier barrier;
  barrier.number = static_cast<u32>(barriers_.size());
  if (known != barriers_.end()) barrier.number = known->second.number;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.warp = warp.index;
  barrier.lane = static_cast<u32>(lane);
  barriers_[offset] = barrier;
  store(*warp.block, offset, barrier);
  if (warp.block->races != nullptr) warp.block->races->initialise_mbarrier(warp, ins, lane, barrier.number);
}

void Mbarriers::fence(const Warp& warp, u32 lanes) {
  for (auto& [offset, barrier] : barriers_) {
    if (barrier.warp == warp.index && on(lanes, static_cast<int>(barrier.lane))) barrier.fenced = true;
  }
}

Mbarrier& Mbarriers::find(Warp& warp, const Instruction& ins, int lane, u32 offset) {
  const auto found = barriers_.find(offset);
  if (found == barriers_.end()) {
    fail(warp, ins, 1u << lane, name_of(offset) + " has not been initialised");
  }
  u64 stored;
  std::memcpy(&stored, warp.block->shared + offset, sizeof stored);
  if (stored != found->second.word()) {
    fail(warp, ins, 1u << lane, name_of(offset) + " has been overwritten");
  }
  if (warp.block->races != nullptr) {
    warp.block->races->use_mbarrier(warp, ins, lane, found->second.number, offset);
  }
  return found->second;
}

void Mbarriers::store(Block& block, u32 offset, const Mbarrier& barrier) {
  const u64 word = barrier.word();
  std::memcpy(block.shared + offset, &word, sizeof word);
  ++block.events;
}

void Mbarriers::end_phase(Block& block, u32 offset, Mbarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    if (block.races != nullptr) block.races->end_phase(barrier.number, barrier.phase);
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
  }
  store(block, offset, barrier);
}

void Mbarriers::arrive(Warp& warp, const Instruction& ins, int lane, u32 offset) {
  Mbarrier& barrier = find(warp, ins, lane, offset);
  if (barrier.pending == 0) {
    fail(warp, ins, 1u << lane, "an arrival beyond the count of " + describe(offset));
  }
  --barrier.pending;
  if (warp.block->races != nullptr) warp.block->races->arrive_at_mbarrier(warp, lane, barrier.number);
  end_phase(*warp.block, offset, barrier);
}

void Mbarriers::expect(Warp& warp, const Instruction& ins, int lane, u32 offset, u64 bytes) {
  Mbarrier& barrier = find(warp, ins, lane, offset);
  barrier.bytes += static_cast<s64>(bytes);
  if (barrier.bytes > kMostBytes) {
    fail(warp, ins, 1u << lane, "more bytes than an mbarrier can count: " + describe(offset));
  }
  store(*warp.block, offset, barrier);
}

bool Mbarriers::has_ended(Warp& warp, const Instruction& ins, int lane, u32 offset, u32 parity) {
  Mbarrier& barrier = find(warp, ins, lane, offset);
  if ((barrier.phase & 1) == parity) return false;
  ++warp.block->events;
  // Phases before the current one have been waited for now.
  const auto waited_for = [&](const BoxCopy& copy) {
    return copy.barrier == offset && copy.done && copy.phase < barrier.phase;
  };
  copies_.erase(std::remove_if(copies_.begin(), copies_.end(), waited_for), copies_.end());
  return true;
}

void Mbarriers::see(const Warp& warp, u32 lanes, u32 offset) {
  if (warp.block->races != nullptr)
    warp.block->races->wait_for_mbarrier(warp, lanes, barriers_.at(offset).number);
}

void Mbarriers::start(const BoxCopy& copy) {
  Block& block = *copy.warp->block;
  const Mbarrier& barrier = find(*copy.warp, *copy.instruction, copy.lane, copy.barrier);
  if (!barrier.fenced) {
    fail(*copy.warp, *copy.instruction, 1u << copy.lane,
         "a copy whose barrier the asynchronous proxy does not know: no fence.mbarrier_init after the "
         "initialisation of " +
             name_of(copy.barrier));
  }
  if (block.races != nullptr) {
    block.races->start_box(*copy.warp, *copy.instruction, copy.lane, copy.to, copy.bytes(), barrier.number);
  }
  copies_.push_back(copy);
  if (options().late_copies) {
    std::memset(block.shared + copy.to, kUnwritten, copy.bytes());
  } else {
    perform(block, copies_.back());
  }
}

void Mbarriers::perform(Block& block, BoxCopy& copy) {
  Mbarrier& barrier = find(*copy.warp, *copy.instruction, copy.lane, copy.barrier);
  const u32 row_bytes = copy.map.row_bytes();
  copy.for_rows([&](u32 row, u64 address, u32 before, u32 read) {
    // Elements are no larger than chunks, and a row's ends need not be those of chunks.
    for (u32 byte = 0; byte < row_bytes;) {
      const bool inside = byte >= before && byte < before + read;
      const u32 chunk_end = std::min(row_bytes, (byte / kChunk + 1) * kChunk);
      const u32 end = std::min(chunk_end, byte < before ? before : inside ? before + read : row_bytes);
      u8* const to = block.shared + place_of(copy, row * row_bytes + byte);
      if (inside) {
        std::memcpy(to, reinterpret_cast<const u8*>(address + byte - before), end - byte);
      } else {
        std::memset(to, 0, end - byte);
      }
      byte = end;
    }
  });
  copy.done = true;
  copy.phase = barrier.phase;
  if (block.races != nullptr) block.races->finish_box(copy.to, copy.bytes(), copy.phase);
  barrier.bytes -= copy.bytes();
  if (barrier.bytes < -kMostBytes) {
    fail(*copy.warp, *copy.instruction, 1u << copy.lane,
         "more bytes than an mbarrier can count: " + describe(copy.barrier));
  }
  end_phase(block, copy.barrier, barrier);
}

bool Mbarriers::bring(Block& block, u32 offset) {
  bool any = false;
  for (BoxCopy& copy : copies_) {
    if (copy.barrier != offset || copy.done) continue;
    perform(block, copy);
    any = true;
  }
  return any;
}

}  // namespace ptx_machine
