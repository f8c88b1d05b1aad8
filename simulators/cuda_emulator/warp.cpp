#include "warp.h"

#include <cstdio>
#include <cstring>

#include "races.h"
#include "scheduler.h"

namespace selfattn::emulator {

namespace {

std::string hexadecimal(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

// Returns the lanes of a warp that exist; the last warp of a block may be shorter.
uint32_t existing_lanes(int warp) {
  const int count = static_cast<int>(block().threads.size()) - warp * kWarpSize;
  return count >= kWarpSize ? kFullMask : (1u << count) - 1;
}

Thread& thread_of(int warp, int lane) {
  return *block().threads[static_cast<size_t>(warp * kWarpSize + lane)];
}

void check_mask(const Site& site, uint32_t mask) {
  const Thread& thread = self();
  if ((mask >> thread.lane & 1) == 0) {
    fail(whereabouts() + " calls " + to_string(site) + " with the mask " + hexadecimal(mask) +
         ", which lacks the lane itself");
  }
  if ((mask & ~existing_lanes(thread.warp)) != 0) {
    fail(whereabouts() + " calls " + to_string(site) + " with the mask " + hexadecimal(mask) +
         ", but its warp has the lanes " + hexadecimal(existing_lanes(thread.warp)) + " only");
  }
}

// Returns the meeting that this lane joins, which is new or was begun by others.
Meeting& meeting_for(const Site& site, uint32_t mask) {
  Warp& warp = block().warps[static_cast<size_t>(self().warp)];
  for (Meeting& meeting : warp.meetings) {
    if ((meeting.mask & mask) == 0) continue;
    const char* const names[] = {meeting.site.primitive, site.primitive};
    if (meeting.mask == mask && (names[0] == names[1] || std::strcmp(names[0], names[1]) == 0))
      return meeting;
    fail("the warp diverges: " + whereabouts() + " comes to " + to_string(site) + " with the mask " +
         hexadecimal(mask) + ", while the lanes " + hexadecimal(meeting.arrived) + " wait for it in " +
         to_string(meeting.site) + " with the mask " + hexadecimal(meeting.mask));
  }
  warp.meetings.push_back({site, mask, 0, {}});
  return warp.meetings.back();
}

}  // namespace

void meet(const Site& site, uint32_t mask, void* operands, void (*compute)(const Operands&)) {
  Thread& thread = self();
  thread.copies.pass();
  check_mask(site, mask);
  Meeting& meeting = meeting_for(site, mask);
  meeting.operands[static_cast<size_t>(thread.lane)] = operands;
  meeting.arrived |= 1u << thread.lane;
  if (meeting.arrived != mask) return wait(site);

  const Operands all = meeting.operands;
  auto& meetings = block().warps[static_cast<size_t>(thread.warp)].meetings;
  meetings.erase(meetings.begin() + (&meeting - meetings.data()));
  if (compute != nullptr) compute(all);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) != 0 && lane != thread.lane) wake(thread_of(thread.warp, lane));
  }
}

int meet_block(const Site& site, bool vote) {
  Barrier& barrier = block().barrier;
  self().copies.pass();
  barrier.votes += vote ? 1 : 0;
  if (++barrier.arrived < static_cast<int>(block().threads.size())) {
    wait(site);
    return barrier.last_votes;
  }
  barrier.last_votes = barrier.votes;
  barrier.arrived = 0;
  barrier.votes = 0;
  std::vector<int> everyone;
  for (const auto& thread : block().threads) everyone.push_back(thread->number);
  races::synchronise(everyone);
  for (const auto& thread : block().threads) {
    if (thread.get() != &self()) wake(*thread);
  }
  return barrier.last_votes;
}

}  // namespace selfattn::emulator
