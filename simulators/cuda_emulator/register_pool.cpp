#include "register_pool.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "group_products.h"
#include "scheduler.h"

namespace selfattn::emulator::registers {

namespace {

constexpr int kOfMultiprocessor = 65536;
constexpr int kStep = 8;
constexpr int kFewest = 24;
constexpr int kMost = 256;

struct Group {
  int registers = 0;  // of each thread
  int asked = 0;
  bool takes = false;
  Site site;
  int arrived = 0;
  uint64_t rounds = 0;
  std::vector<Thread*> waiting;
};

std::vector<Group> groups;
int in_pool = 0;  // registers that no group has, counted per thread of a group

// Gives the group, all of whose threads have come, what it asks for. Returns false if there are too few
// registers.
bool settle(Group& group) {
  const int more = group.asked - group.registers;
  if (more > in_pool) return false;
  in_pool -= more;
  group.registers = group.asked;
  group.arrived = 0;
  ++group.rounds;
  for (Thread* thread : std::exchange(group.waiting, {})) wake(*thread);
  return true;
}

}  // namespace

void start_block() {
  // The compiler chooses how many registers a thread has at first. It has at most this many, because the
  // block fits.
  const int threads = static_cast<int>(block().threads.size());
  const int each = std::min(kOfMultiprocessor / threads / kStep * kStep, kMost);
  groups.assign(static_cast<size_t>(threads / products::kGroupThreads), Group());
  for (Group& group : groups) group.registers = each;
  in_pool = 0;
}

void set(int count, bool takes, const Site& site) {
  const int number = products::group_of_self(site);
  if (count % kStep != 0 || count < kFewest || count > kMost) {
    fail(whereabouts() + " calls " + to_string(site) + " with " + std::to_string(count) +
         " registers: it must be a multiple of 8 from 24 to 256");
  }
  Group& group = groups[static_cast<size_t>(number)];
  if (group.arrived > 0 && (group.asked != count || group.takes != takes)) {
    fail("the warpgroup diverges: " + whereabouts() + " comes to " + to_string(site) + " for " +
         std::to_string(count) + " registers, others to " + to_string(group.site) + " for " +
         std::to_string(group.asked));
  }
  if (takes ? count < group.registers : count > group.registers) {
    fail(whereabouts() + " calls " + to_string(site) + " for " + std::to_string(count) +
         " registers, and has " + std::to_string(group.registers));
  }
  group.asked = count;
  group.takes = takes;
  group.site = site;
  const uint64_t round = group.rounds;
  if (++group.arrived == products::kGroupThreads) {
    settle(group);
    // Other groups may be waiting for what this one gives up.
    for (Group& other : groups) {
      if (!takes && other.arrived == products::kGroupThreads) settle(other);
    }
  }
  while (group.rounds == round) {
    group.waiting.push_back(&self());
    wait(site);
  }
}

std::string what_groups_lack() {
  std::string text;
  for (size_t number = 0; number < groups.size(); ++number) {
    const Group& group = groups[number];
    if (group.arrived == 0) continue;
    text += "\n  warpgroup " + std::to_string(number) + " has " + std::to_string(group.registers) +
            " registers a thread and waits for " + std::to_string(group.asked) + ", of " +
            std::to_string(group.arrived) + " threads; others have given up " + std::to_string(in_pool);
  }
  return text;
}

}  // namespace selfattn::emulator::registers
