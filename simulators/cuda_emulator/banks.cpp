#include "banks.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
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

// A site's primitive, file and line. A site in a header has an entry for each file that includes it.
using Key = std::tuple<const char*, const char*, int>;
std::map<Key, Count> counts;
// Keys are the warp, the number of the copy within its lane, and the quarter of the warp.
std::map<std::tuple<int, int, int>, Copy> copies;
std::vector<int> copies_of_thread;

void print_report() { std::fprintf(stderr, "cuda emulator: shared memory\n%s", take_report().c_str()); }

}  // namespace

int wavefronts(const std::vector<const void*>& addresses) {
  std::array<std::array<uintptr_t, kLanesPerWavefront>, kBanks> words;
  std::array<int, kBanks> counts{};  // how many different words of each bank are needed
  for (const void* address : addresses) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(address) / kWordBytes;
    for (uintptr_t word = first; word < first + kWordsPerLane; ++word) {
      const auto end = words[word % kBanks].begin() + counts[word % kBanks];
      if (std::find(words[word % kBanks].begin(), end, word) != end) continue;
      *end = word;
      ++counts[word % kBanks];
    }
  }
  return *std::max_element(counts.begin(), counts.end());
}

void record(const Site& site, const std::vector<const void*>& addresses) {
  if (!options().banks) return;
  static const bool printed_at_exit = std::atexit(&print_report) == 0;
  static_cast<void>(printed_at_exit);
  Count& count = counts[{site.primitive, site.file, site.line}];
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
  std::map<std::string, Count> places;
  for (const auto& [key, count] : counts) {
    Count& sum = places[to_string({std::get<0>(key), std::get<1>(key), std::get<2>(key)})];
    sum.accesses += count.accesses;
    sum.wavefronts += count.wavefronts;
  }
  std::string report;
  for (const auto& [place, count] : places) {
    report += "  " + place + ": " + std::to_string(count.accesses) + " accesses, " +
              std::to_string(count.wavefronts) + " wavefronts\n";
  }
  counts.clear();
  return report;
}

}  // namespace selfattn::emulator::banks
