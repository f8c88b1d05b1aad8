#include "execute/counts.h"

#include <algorithm>

#include "decode/text.h"
#include "options.h"

namespace ptx_machine {

namespace {

unsigned long long number(u64 value) { return value; }

// Sets the bit, and returns whether it was not set before.
bool set_bit(u64* bits, u64 place) {
  u64& word = bits[place / 64];
  const u64 bit = 1ull << place % 64;
  const bool is_new = (word & bit) == 0;
  word |= bit;
  return is_new;
}

}  // namespace

Counts::Counts(const char* path) : file_(std::fopen(path, "a")) {
  if (file_ != nullptr) return;
  std::fprintf(stderr, "ptx machine: SELFATTN_PTX_COUNTS: %s cannot be written\n", path);
  std::_Exit(2);
}

Counts* Counts::wanted() {
  // It is never destroyed, because the process launches kernels until its very end.
  static auto* const counts = options().counts.empty() ? nullptr : new Counts(options().counts.c_str());
  return counts;
}

void Counts::start(const Kernel& kernel) {
  before_.clear();
  for (const Instruction& ins : kernel.code) {
    before_.push_back({ins.executed, ins.accesses, ins.wavefronts, ins.least_wavefronts});
  }
  pages_.clear();
  page_ = nullptr;
  std::fill(std::begin(traffic_), std::end(traffic_), Accesses());
  read_ = written_ = loaded_ = 0;
}

void Counts::start_block() { ++block_; }

void Counts::touch(u64 sector, Traffic traffic) {
  const u64 page_number = sector / kSectorsOfPage, place = sector % kSectorsOfPage;
  if (page_ == nullptr || page_number_ != page_number) {
    page_ = &pages_[page_number];
    page_number_ = page_number;
  }
  if (traffic != kStore && set_bit(page_->read, place)) ++read_;
  if ((traffic == kStore || traffic == kAtomic) && set_bit(page_->written, place)) ++written_;
  if (traffic != kLoad) return;
  if (page_->loaded_by != block_) {
    std::fill(std::begin(page_->loaded), std::end(page_->loaded), 0);
    page_->loaded_by = block_;
  }
  if (set_bit(page_->loaded, place)) ++loaded_;
}

void Counts::device(u32 mask, const MemoryAccess& access, const u64 (&addresses)[kLanes]) {
  const Traffic traffic = access.access == Access::kAtomic ? kAtomic
                          : access.is_copy                 ? kCopy
                          : access.access == Access::kRead ? kLoad
                                                           : kStore;
  u64 sectors[kLanes];  // aligned accesses of up to 16 bytes lie in one each
  int count = 0;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    sectors[count++] = addresses[first_lane(rest)] / kSectorBytes;
  }
  Accesses& accesses = traffic_[traffic];
  ++accesses.accesses;
  accesses.bytes += static_cast<u64>(count) * access.bytes;
  std::sort(sectors, sectors + count);
  const u64* const end = std::unique(sectors, sectors + count);
  accesses.sectors += static_cast<u64>(end - sectors);
  for (const u64* sector = sectors; sector != end; ++sector) touch(*sector, traffic);
}

void Counts::box_row(u64 address, u32 bytes) {
  for (u64 sector = address / kSectorBytes; sector <= (address + bytes - 1) / kSectorBytes; ++sector) {
    ++traffic_[kCopy].sectors;
    touch(sector, kCopy);
  }
}

void Counts::box(u64 bytes) {
  ++traffic_[kCopy].accesses;
  traffic_[kCopy].bytes += bytes;
}

void Counts::finish(const Kernel& kernel, const Launch& launch) {
  u64 executed[kInstructionClasses] = {};
  u64 accesses = 0, wavefronts = 0, least = 0;
  for (size_t n = 0; n < kernel.code.size(); ++n) {
    const Instruction& ins = kernel.code[n];
    executed[static_cast<int>(ins.instruction_class)] += (ins.executed - before_[n].executed) * ins.repeats;
    accesses += ins.accesses - before_[n].accesses;
    wavefronts += ins.wavefronts - before_[n].wavefronts;
    least += ins.least_wavefronts - before_[n].least_wavefronts;
  }
  const u32 *grid = launch.grid, *block = launch.block;
  std::fprintf(file_, "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ",
               demangled(kernel.name).c_str(), grid[0], grid[1], grid[2], block[0], block[1], block[2]);
  std::fprintf(file_, "\"dynamic_shared\": %u, \"static_shared\": %u, \"instructions\": {",
               launch.dynamic_shared, kernel.static_shared);
  for (int n = 0; n < kInstructionClasses; ++n) {
    std::fprintf(file_, "%s\"%s\": %llu", n > 0 ? ", " : "", class_name(static_cast<InstructionClass>(n)),
                 number(executed[n]));
  }
  std::fprintf(file_, "}, ");
  static const char* const kTrafficNames[kTraffics] = {"load", "store", "copy", "atomic"};
  for (int n = 0; n < kTraffics; ++n) {
    std::fprintf(file_, "\"%s\": {\"accesses\": %llu, \"bytes\": %llu, \"sectors\": %llu}, ",
                 kTrafficNames[n], number(traffic_[n].accesses), number(traffic_[n].bytes),
                 number(traffic_[n].sectors));
  }
  std::fprintf(file_, "\"sectors\": {\"read\": %llu, \"written\": %llu, \"loaded_by_blocks\": %llu}, ",
               number(read_), number(written_), number(loaded_));
  std::fprintf(file_, "\"shared\": {\"accesses\": %llu, \"wavefronts\": %llu, \"least\": %llu}}\n",
               number(accesses), number(wavefronts), number(least));
  std::fflush(file_);
}

}  // namespace ptx_machine
