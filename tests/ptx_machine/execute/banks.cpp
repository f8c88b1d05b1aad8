#include "execute/banks.h"

#include <algorithm>
#include <map>

namespace ptx_machine {

namespace {

constexpr u32 kBanks = 32;
constexpr u32 kWordBytes = 4;

u32 wavefronts(const std::vector<u32>& words) {
  std::vector<u32> of_bank[kBanks];
  for (const u32 word : words) {
    auto& bank = of_bank[word % kBanks];
    if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
  }
  size_t most = 0;
  for (const auto& bank : of_bank) most = std::max(most, bank.size());
  return static_cast<u32>(most);
}

}  // namespace

void count_wavefronts(const Instruction& ins, u32 mask, u32 bytes, const u8* memory,
                      u8* const (&pointers)[kLanes]) {
  const u32 each = std::max(bytes, kWordBytes);
  const int lanes = static_cast<int>(kBanks * kWordBytes / each);
  for (int first = 0; first < kLanes; first += lanes) {
    std::vector<u32> words;
    for (int l = first; l < first + lanes; ++l) {
      if (!on(mask, l)) continue;
      const auto word = static_cast<u32>(pointers[l] - memory) / kWordBytes;
      for (u32 n = 0; n < each / kWordBytes; ++n) words.push_back(word + n);
    }
    if (words.empty()) continue;
    ++ins.accesses;
    ins.wavefronts += wavefronts(words);
  }
}

std::string banks_report(const Module& module) {
  struct Count {
    u64 accesses = 0, wavefronts = 0;
  };
  std::map<std::string, Count> places;
  for (const auto& [name, kernel] : module.kernels) {
    for (const Instruction& ins : kernel->code) {
      if (ins.accesses == 0) continue;
      Count& count = places[module.source_of(ins)];
      count.accesses += ins.accesses;
      count.wavefronts += ins.wavefronts;
    }
  }
  std::string report;
  for (const auto& [place, count] : places) {
    report += "ptx machine: " + place + ": " + std::to_string(count.accesses) + " accesses, " +
              std::to_string(count.wavefronts) + " wavefronts\n";
  }
  return report;
}

}  // namespace ptx_machine
