#include "execute/banks.h"

#include <algorithm>
#include <map>

namespace ptx_machine {

namespace {

constexpr u32 kBanks = 32;
constexpr u32 kWordBytes = 4;

// The different words of each bank that lanes need.
class Words {
 public:
  void add(u32 word) {
    u32* const bank = words_[word % kBanks];
    u32& count = counts_[word % kBanks];
    if (std::find(bank, bank + count, word) == bank + count) bank[count++] = word;
  }
  u32 wavefronts() const { return *std::max_element(std::begin(counts_), std::end(counts_)); }

 private:
  // The words of a lane are neighbours, in different banks.
  u32 words_[kBanks][kLanes];
  u32 counts_[kBanks] = {};
};

}  // namespace

void count_wavefronts(const Instruction& ins, u32 mask, u32 bytes, const u8* memory,
                      u8* const (&pointers)[kLanes]) {
  const u32 each = std::max(bytes, kWordBytes);
  const int lanes = static_cast<int>(kBanks * kWordBytes / each);
  Words of_all;
  for (int first = 0; first < kLanes; first += lanes) {
    Words words;
    for (int l = first; l < first + lanes; ++l) {
      if (!on(mask, l)) continue;
      const auto word = static_cast<u32>(pointers[l] - memory) / kWordBytes;
      for (u32 n = 0; n < each / kWordBytes; ++n) {
        words.add(word + n);
        of_all.add(word + n);
      }
    }
    if (words.wavefronts() == 0) continue;
    ++ins.accesses;
    ins.wavefronts += words.wavefronts();
  }
  ins.least_wavefronts += of_all.wavefronts();
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
