// Barriers of asynchronous copies (mbarrier) of a block, and the copies that they count.
//
// A phase ends when as many threads have arrived as the barrier was initialised for, and copies have brought
// all bytes that were announced. A barrier's memory holds a word that changes with each operation, so that
// stores over a barrier are noticed.
//
// A copy happens when a thread waits for its barrier in vain and nothing else in the block can go on, or at
// once (SELFATTN_PTX_COPIES). A thread must have waited for it before the block ends.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tensor_map.h"
#include "types.h"

namespace ptx_machine {

struct Block;
struct Instruction;
struct Warp;

struct Mbarrier {
  u32 number = 0;    // in the order of initialisation
  u32 arrivals = 0;  // arrivals that each phase needs
  u32 pending = 0;   // arrivals that the current phase still needs
  s64 bytes = 0;     // bytes that it still needs; negative if too many came
  u32 phase = 0;
  u32 warp = 0, lane = 0;  // the thread that initialised it
  bool fenced = false;     // whether copies know that it is initialised

  u64 word() const;  // what its memory holds
};

struct BoxCopy {
  Warp* warp;
  const Instruction* instruction;
  int lane;
  u32 to, barrier;  // offsets in shared memory
  TensorMap map;
  s32 coordinates[TensorMap::kMostDimensions];
  bool done = false;
  u32 phase = 0;  // the phase in which it was done

  u32 bytes() const { return map.rows() * map.row_bytes(); }
  // Visits the rows of the box, clipped to the tensor: `row` gets the row's number, its address, how many
  // bytes before it are zeros, and how many bytes are read, which may be none.
  template <class F>
  void for_rows(F&& row) const {
    u64 at[TensorMap::kMostDimensions] = {};
    const u32 rows = map.rows(), element = map.element_bytes();
    for (u32 n = 0; n < rows; ++n) {
      u64 address = map.address;
      bool inside = true;
      for (int d = 1; d < map.dimensions; ++d) {
        const s64 coordinate = coordinates[d] + static_cast<s64>(at[d]);
        inside = inside && coordinate >= 0 && static_cast<u64>(coordinate) < map.size(d);
        address += static_cast<u64>(coordinate) * map.strides[d];
      }
      const s64 first = coordinates[0] < 0 ? 0 : coordinates[0];
      const s64 beyond = s64{coordinates[0]} + map.box[0], size = static_cast<s64>(map.size(0));
      const s64 end = beyond < size ? beyond : size;
      const u32 before = static_cast<u32>(first - coordinates[0]) * element;
      const u32 read = inside && end > first ? static_cast<u32>(end - first) * element : 0;
      row(n, address + static_cast<u64>(first) * element, before, read);
      for (int d = 1; d < map.dimensions && ++at[d] == map.box[d]; ++d) at[d] = 0;
    }
  }
};

class Mbarriers {
 public:
  void start_block();
  // Reports copies that no thread has waited for when the block ends.
  void end_block() const;

  void initialise(Warp& warp, const Instruction& ins, int lane, u32 offset, u32 arrivals);
  // These lanes execute fence.mbarrier_init or fence.proxy.async.
  void fence(const Warp& warp, u32 lanes);
  void arrive(Warp& warp, const Instruction& ins, int lane, u32 offset);
  void expect(Warp& warp, const Instruction& ins, int lane, u32 offset, u64 bytes);
  // Returns whether the phase of this parity has ended.
  bool has_ended(Warp& warp, const Instruction& ins, int lane, u32 offset, u32 parity);
  // These lanes have seen that the phase has ended, and come after it.
  void see(const Warp& warp, u32 lanes, u32 offset);
  // Describes what a barrier lacks: "the mbarrier at byte 16 of shared memory, ..."
  std::string describe(u32 offset) const;

  void start(const BoxCopy& copy);
  // Performs copies that are on their way to a barrier; returns false if there are none.
  bool bring(Block& block, u32 offset);

 private:
  Mbarrier& find(Warp& warp, const Instruction& ins, int lane, u32 offset);
  void store(Block& block, u32 offset, const Mbarrier& barrier);
  void end_phase(Block& block, u32 offset, Mbarrier& barrier);
  void perform(Block& block, BoxCopy& copy);

  std::map<u32, Mbarrier> barriers_;
  std::vector<BoxCopy> copies_;
};

}  // namespace ptx_machine
