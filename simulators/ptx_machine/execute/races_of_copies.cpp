// The race detector's half for Hopper: mbarriers, copies of boxes, products, and fences of proxies.
#include <stdexcept>

#include "execute/races.h"

namespace ptx_machine {

namespace {

constexpr u32 kWordBytes = 4;
constexpr u8 kWholeWord = 0xf;
constexpr u32 kOnItsWay = ~0u;  // an epoch that nothing comes after

std::string in_shared_memory(u32 word) {
  return "byte " + std::to_string(word * kWordBytes) + " of shared memory";
}

}  // namespace

bool Races::covers(const Clock& clock, const Mark& before) const {
  if (before.epoch < clock.epochs[before.actor]) return true;
  if (before.actor >= warps_) return false;
  for (u32 rest = before.lanes; rest != 0; rest &= rest - 1) {
    const size_t lane = before.actor * size_t{kLanes} + static_cast<size_t>(first_lane(rest));
    if (before.step >= clock.steps[lane]) return false;
  }
  return true;
}

bool Races::ordered_for_proxy(const Mark& before, const Warp& warp, int lane) const {
  if (before.block != serial_) return true;                        // it was never written
  if (before.actor >= warps_) return ordered(before, warp, lane);  // that proxy wrote it
  const Knowledge* of_lane = lanes_know_[warp.index * kLanes + static_cast<u32>(lane)].get();
  return covers(knows_[warp.index].fenced, before) || (of_lane != nullptr && covers(of_lane->fenced, before));
}

const char* Races::kind_of(const Mark& before) const {
  return before.block == serial_ && before.actor >= readers_ ? "an asynchronous copy" : "a write";
}

std::string Races::actor_name(const Mark& before) const {
  if (before.actor >= readers_) return "the asynchronous proxy";
  if (before.actor >= warps_) {
    return "a product of warpgroup " + std::to_string(before.actor - warps_) +
           ", which has not been waited for,";
  }
  return "warp " + std::to_string(before.actor) + ", lanes " + lanes_text(before.lanes);
}

void Races::report_unfenced(const Warp& warp, const Instruction& ins, int lane, u32 word) const {
  const Mark& write = words_[word].write;
  fail(warp, ins, 1u << lane,
       "race on " + in_shared_memory(word) + ": no fence.proxy.async is between this and a write by " +
           actor_name(write) + " at " + place_text(*warp.block->kernel, *write.instruction));
}

void Races::fold(const Warp& warp) {
  for (int l = 0; l < kLanes; ++l) {
    std::unique_ptr<Knowledge>& known = lanes_know_[warp.index * kLanes + static_cast<u32>(l)];
    if (known == nullptr) continue;
    knows_[warp.index].merge(*known);
    known = nullptr;
  }
}

// Merges what comes before what the lane does next. Of its own warp this is what all lanes did before they
// last synchronised, and what lanes did that this one comes after, including their fences.
void Races::merge_lane(Knowledge& into, const Warp& warp, int lane) const {
  const Knowledge& known = knows_[warp.index];
  const Lanes& lanes = lanes_[warp.index];
  const size_t first = warp.index * size_t{kLanes};
  const std::vector<u32> fenced_before(
      into.fenced.steps.begin() + static_cast<std::ptrdiff_t>(first),
      into.fenced.steps.begin() + static_cast<std::ptrdiff_t>(first + kLanes));
  into.merge(known);
  if (const Knowledge* of_lane = lanes_know_[first + static_cast<size_t>(lane)].get()) into.merge(*of_lane);
  for (u32 l = 0; l < kLanes; ++l) {
    const bool own = l == static_cast<u32>(lane);
    const u32 after = own ? lanes.step : std::max(lanes.whole, lanes.comes_after[lane][l]);
    const u32 fenced = known.fenced.steps[first + l];
    into.all.steps[first + l] = std::max(into.all.steps[first + l], after);
    into.fenced.steps[first + l] = fenced <= after ? std::max(fenced_before[l], fenced) : fenced_before[l];
  }
}

void Races::initialise_mbarrier(const Warp& warp, const Instruction& ins, int lane, u32 number) {
  if (number >= initialisations_.size())
    throw std::runtime_error("ptx machine: more mbarriers than races are looked for");
  initialisations_[number] = mark(warp, ins, lane, kWholeWord, Access::kWrite);
}

void Races::use_mbarrier(const Warp& warp, const Instruction& ins, int lane, u32 number, u32 offset) const {
  const Mark& before = initialisations_[number];
  if (ordered(before, warp, lane)) return;
  report(warp, ins, lane, "the mbarrier at " + in_shared_memory(offset / kWordBytes), before,
         "the initialisation");
}

void Races::arrive_at_mbarrier(const Warp& warp, int lane, u32 number) {
  std::unique_ptr<Phases>& phases = mbarriers_[number];
  if (phases == nullptr) {
    phases = std::make_unique<Phases>();
    phases->gathered.reset(actors_, warps_);
    phases->ended.reset(actors_, warps_);
  }
  ++lanes_[warp.index].step;  // what the lane does from here on is not passed on
  merge_lane(phases->gathered, warp, lane);
}

void Races::end_phase(u32 number, u32 phase) {
  if (mbarriers_[number] == nullptr) return;
  Phases& phases = *mbarriers_[number];
  std::swap(phases.ended, phases.gathered);
  phases.gathered.reset(actors_, warps_);
  phases.ended.all.epochs[mbarrier_actor(number)] = phase + 2;
}

void Races::wait_for_mbarrier(const Warp& warp, u32 lanes, u32 number) {
  if (mbarriers_[number] == nullptr) return;
  const Knowledge& ended = mbarriers_[number]->ended;
  if (lanes == warp.alive) {
    knows_[warp.index].merge(ended);
    return;
  }
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    std::unique_ptr<Knowledge>& known = lanes_know_[warp.index * kLanes + static_cast<u32>(first_lane(rest))];
    if (known == nullptr) {
      known = std::make_unique<Knowledge>();
      known->reset(actors_, warps_);
    }
    known->merge(ended);
  }
}

void Races::fence_proxy(const Warp& warp, u32 lanes) {
  const u32 step = ++lanes_[warp.index].step;
  Knowledge& of_warp = knows_[warp.index];
  if (lanes == warp.alive) of_warp.fenced.merge(of_warp.all);
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const u32 lane = warp.index * kLanes + static_cast<u32>(first_lane(rest));
    of_warp.fenced.steps[lane] = step;
    std::unique_ptr<Knowledge>& known = lanes_know_[lane];
    if (known == nullptr && lanes == warp.alive) continue;
    if (known == nullptr) {
      known = std::make_unique<Knowledge>();
      known->reset(actors_, warps_);
    }
    known->fenced.merge(of_warp.all);
    known->fenced.merge(known->all);
  }
}

void Races::start_box(const Warp& warp, const Instruction& ins, int lane, u32 offset, u32 bytes, u32 number) {
  for (u32 word = offset / kWordBytes; word < (offset + bytes) / kWordBytes; ++word) {
    SharedWord& known = shared_word(word);
    const auto where = [&] { return in_shared_memory(word); };
    if (known.in_flight) {
      report(warp, ins, lane, where(), known.write, "an asynchronous copy that is on its way");
    }
    Mark now = mark(warp, ins, lane, kWholeWord, Access::kWrite);
    if (known.write.block == serial_ && known.write.actor < warps_ && ordered(known.write, warp, lane) &&
        !ordered_for_proxy(known.write, warp, lane)) {
      report_unfenced(warp, ins, lane, word);
    }
    check_write(warp, ins, lane, word, now);
    now.actor = mbarrier_actor(number);
    now.epoch = kOnItsWay;
    known.write = now;
    known.written = kWholeWord;
    known.in_flight = true;
  }
}

void Races::finish_box(u32 offset, u32 bytes, u32 phase) {
  for (u32 word = offset / kWordBytes; word < (offset + bytes) / kWordBytes; ++word) {
    words_[word].in_flight = false;
    words_[word].write.epoch = phase + 1;
  }
}

void Races::read_for_product(const Warp& warp, const Instruction& ins, u32 offset, u32 bytes, u32 nth) {
  for (u32 word = offset / kWordBytes; word < (offset + bytes) / kWordBytes; ++word) {
    SharedWord& known = shared_word(word);
    const auto where = [&] { return in_shared_memory(word); };
    if (known.in_flight)
      report(warp, ins, 0, where(), known.write, "an asynchronous copy that is on its way");
    if (known.written != kWholeWord) {
      fail(warp, ins, kWholeWarp, "a read of " + where() + ", which nobody has written");
    }
    if (!ordered_for_proxy(known.write, warp, 0)) {
      if (known.write.actor < warps_ && ordered(known.write, warp, 0)) report_unfenced(warp, ins, 0, word);
      report(warp, ins, 0, where(), known.write, kind_of(known.write));
    }
    Mark& read = reads_[word * readers_ + products_of(warp)];
    if (read.block == serial_ && read.epoch > nth) continue;
    read = mark(warp, ins, 0, kWholeWord, Access::kRead);
    read.actor = products_of(warp);
    read.epoch = nth + 1;
  }
}

void Races::wait_for_product(const Warp& warp, u32 nth) {
  u32& known = knows_[warp.index].all.epochs[products_of(warp)];
  known = std::max(known, nth + 2);
}

}  // namespace ptx_machine
