#include "banks.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <tuple>

#include "options.h"
#include "scheduler.h"

namespace selfattn::emulator::banks {

namespace {

constexpr int kBanks = 32;
constexpr int kWordBytes = 4;
constexpr int kWordsPerLane = 4;
constexpr int kLanesPerWavefront = 8;

struct Count {
  int64_t accesses = 0;
  int64_t wavefronts = 0;
};

struct Copy {
  Site site;
  std::vector<const void*> addresses;
};

std::map<std::string, Count> counts;
// By warp, number of the copy in its lane, and quarter of the warp.
std::map<std::tuple<int, int, int>, Copy> copies;
std::vector<int> copies_of_thread;

void print_report() { std::fprintf(stderr, "cuda emulator: shared memory\n%s", take_report().c_str()); }

}  // namespace

int wavefronts(const std::vector<const void*>& addresses) {
  std::array<std::set<uintptr_t>, kBanks> words;
  for (const void* address : addresses) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(address) / kWordBytes;
    for (uintptr_t word = first; word < first + kWordsPerLane; ++word) words[word % kBanks].insert(word);
  }
  size_t most = 0;
  for (const auto& bank : words) most = std::max(most, bank.size());
  return static_cast<int>(most);
}

void record(const Site& site, const std::vector<const void*>& addresses) {
  if (!options().banks) return;
  static const bool printed_at_exit = std::atexit(&print_report) == 0;
  static_cast<void>(printed_at_exit);
  Count& count = counts[to_string(site)];
  ++count.accesses;
  count.wavefronts += wavefronts(addresses);
}

void record_copy(const Site& site, const void* destination) {
  if (!options().banks) return;
  const Thread& thread = self();
  copies_of_thread.resize(block().threads.size(), 0);
  const int number = copies_of_thread[static_cast<size_t>(thread.number)]++;
  Copy& copy = copies[{thread.warp, number, thread.lane / kLanesPerWavefront}];
  copy.site = site;
  copy.addresses.push_back(destination);
}

void end_block() {
  for (const auto& [key, copy] : copies) record(copy.site, copy.addresses);
  copies.clear();
  copies_of_thread.clear();
}

std::string take_report() {
  std::string report;
  for (const auto& [place, count] : counts) {
    report += "  " + place + ": " + std::to_string(count.accesses) + " accesses, " +
              std::to_string(count.wavefronts) + " wavefronts\n";
  }
  counts.clear();
  return report;
}

}  // namespace selfattn::emulator::banks
