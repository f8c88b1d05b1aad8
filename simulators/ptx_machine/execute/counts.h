// Counts what each launch asks of a device. These are instructions by class, bytes and sectors of device
// memory, and wavefronts of shared memory. A line of JSON for each launch goes to the file that
// SELFATTN_PTX_COUNTS names.
//
// Instructions are those of the PTX, as warps issue them, whether or not their guard lets a lane pass; ptxas
// makes fewer or more of them. Everything else is the same in machine code.
#pragma once

#include <cstdio>
#include <unordered_map>
#include <vector>

#include "execute/warp.h"
#include "instructions/access.h"

namespace ptx_machine {

class Counts {
 public:
  // Null where nobody asked for them.
  static Counts* wanted();

  void start(const Kernel& kernel);
  void start_block();
  // Lanes in `mask` access so many bytes each.
  void device(u32 mask, const MemoryAccess& access, const u64 (&addresses)[kLanes]);
  // A row that a copy of a box reads, and all of the box.
  void box_row(u64 address, u32 bytes);
  void box(u64 bytes);
  // Writes the line.
  void finish(const Kernel& kernel, const Launch& launch);

 private:
  explicit Counts(const char* path);

  enum Traffic { kLoad, kStore, kCopy, kAtomic, kTraffics };
  struct Accesses {
    u64 accesses = 0;  // of warps
    u64 bytes = 0;     // of lanes
    u64 sectors = 0;   // different ones of each access of a warp
  };
  // What was executed and accessed before this launch.
  struct Before {
    u64 executed, accesses, wavefronts, least_wavefronts;
  };
  // Which sectors of a page were read and written by the launch, and loaded by the current block.
  static constexpr u64 kSectorBytes = 32, kSectorsOfPage = 128;
  struct Page {
    u64 read[kSectorsOfPage / 64] = {}, written[kSectorsOfPage / 64] = {}, loaded[kSectorsOfPage / 64] = {};
    u64 loaded_by = 0;
  };

  void touch(u64 sector, Traffic traffic);

  std::FILE* file_;
  std::vector<Before> before_;
  std::unordered_map<u64, Page> pages_;
  u64 page_number_ = 0;
  Page* page_ = nullptr;  // of that number
  u64 block_ = 0;
  Accesses traffic_[kTraffics];
  u64 read_ = 0, written_ = 0, loaded_ = 0;  // different sectors: of the launch; of each block, summed up
};

}  // namespace ptx_machine
