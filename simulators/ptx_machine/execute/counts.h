// Counts what each launch asks of a device. Counted are instructions by class, bytes and sectors of device
// memory, and wavefronts of shared memory. A line of JSON for each launch goes to the file that
// SELFATTN_PTX_COUNTS names.
//
// Instructions are those of the PTX, as warps issue them, whether or not their guard lets a lane pass; ptxas
// makes fewer or more machine instructions. The other counts are the same in machine code.
#pragma once

#include <cstdio>
#include <unordered_map>
#include <vector>

#include "execute/warp.h"
#include "instructions/access.h"

namespace ptx_machine {

class Counts {
 public:
  // Returns null if nobody asked for counts.
  static Counts* wanted();

  void start(const Kernel& kernel);
  void start_block();
  // Counts an access of device memory by the lanes in `mask`.
  void device(u32 mask, const MemoryAccess& access, const u64 (&addresses)[kLanes]);
  // Count a row that a copy of a box reads, and the whole box.
  void box_row(u64 address, u32 bytes);
  void box(u64 bytes);
  // Writes the line of the launch.
  void finish(const Kernel& kernel, const Launch& launch);

 private:
  explicit Counts(const char* path);

  enum Traffic { kLoad, kStore, kCopy, kAtomic, kTraffics };
  struct Accesses {
    u64 accesses = 0;  // accesses of warps
    u64 bytes = 0;     // bytes of their lanes
    u64 sectors = 0;   // different sectors, counted anew for each access of a warp
  };
  // What was executed and accessed before this launch.
  struct Before {
    u64 executed, accesses, wavefronts, least_wavefronts;
  };
  // The sectors of a page that the launch has read and written, and that the current block has loaded.
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
  Page* page_ = nullptr;  // the page of that number
  u64 block_ = 0;
  Accesses traffic_[kTraffics];
  u64 read_ = 0, written_ = 0, loaded_ = 0;  // different sectors, by launch; loaded_: by block, summed up
};

}  // namespace ptx_machine
