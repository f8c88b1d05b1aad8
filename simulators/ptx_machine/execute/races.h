// The race detector: accesses that nothing orders, and reads of shared memory that nothing wrote.
//
// Barriers order what their warps did before them and do after them; bar.warp.sync orders the lanes of its
// mask. Waiting for asynchronous copies makes them writes of the thread that waits; until then nothing may
// touch what they write. Shuffles, votes, ldmatrix and mma order nothing: CUDA promises no more. Blocks are
// never ordered. Atomic accesses do not race with each other.
//
// What a thread does with an mbarrier must come after its initialisation. A lane that arrives at an mbarrier
// passes on what comes before it: what it did itself, what all lanes did before the warp last synchronised,
// and what it knows of other warps. A thread that has seen a phase end comes after all threads that arrived
// in it, and after the copies of boxes that it counted. Between a thread's write and a copy that overwrites
// it, or a product (wgmma) that reads it, there must be a fence of proxies. Products read from their
// instruction to a wait by any warp of the warpgroup.
//
// For each word of shared memory the detector keeps the last write, the last reads of each warp, and those of
// a warp's earlier reads that some of its lanes do not come after. For each half of a word of device memory,
// which lanes with 16-bit numbers share, it keeps the last write, the last read, and whether several blocks
// have read it.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "execute/knowledge.h"
#include "execute/warp.h"
#include "instructions/access.h"

namespace ptx_machine {

class Races {
 public:
  void start_grid();
  void start_block(const Block& block);

  void shared(const Warp& warp, const Instruction& ins, int lane, u32 offset, u32 bytes, Access access);
  void device(const Warp& warp, const Instruction& ins, int lane, u64 address, u32 bytes, Access access);
  void start_copy(const Warp& warp, const Instruction& ins, int lane, u32 offset, u32 bytes);
  void finish_copy(const Warp& warp, int lane, u32 offset, u32 bytes);

  void synchronise_lanes(const Warp& warp, u32 mask);
  // A warp arrives at a barrier, and the warps that wait there go on.
  void arrive(const Warp& warp, u32 barrier);
  void synchronise_warps(const std::vector<Warp*>& warps, u32 barrier);

  // In races_of_copies.cpp: what Hopper's mbarriers, copies of boxes and products order, and what must be
  // ordered before them. Barriers are given by their numbers.
  void initialise_mbarrier(const Warp& warp, const Instruction& ins, int lane, u32 number);
  void use_mbarrier(const Warp& warp, const Instruction& ins, int lane, u32 number, u32 offset) const;
  void arrive_at_mbarrier(const Warp& warp, int lane, u32 number);
  void end_phase(u32 number, u32 phase);
  void wait_for_mbarrier(const Warp& warp, u32 lanes, u32 number);
  void fence_proxy(const Warp& warp, u32 lanes);
  void start_box(const Warp& warp, const Instruction& ins, int lane, u32 offset, u32 bytes, u32 number);
  void finish_box(u32 offset, u32 bytes, u32 phase);
  // The warp's nth product reads these bytes, and the warp has waited for its nth product.
  void read_for_product(const Warp& warp, const Instruction& ins, u32 offset, u32 bytes, u32 nth);
  void wait_for_product(const Warp& warp, u32 nth);

 private:
  // An access to a word or a half, and its time: its warp's counts of barriers (epochs) and of bar.warp.sync
  // (steps).
  struct Mark {
    u64 block = 0;  // a serial number over all launches
    const Instruction* instruction = nullptr;
    u32 lanes = 0;
    u32 epoch = 0, step = 0;
    u16 actor = 0;  // the warp, or another actor of Clock::epochs
    u8 bytes = 0;   // a bit for each byte of the word or its half
    bool atomic = false;
  };
  struct SharedWord {
    Mark write;
    u64 block = 0;
    u8 written = 0;          // bytes of the word that have been written
    bool in_flight = false;  // whether the write is an asynchronous copy on its way
  };
  struct DeviceHalf {
    Mark write, read;
    bool read_by_blocks = false;
  };
  static constexpr u64 kHalvesOfPage = 1024;
  struct Page {
    DeviceHalf halves[kHalvesOfPage];
  };
  // What lanes of a warp know of each other. Steps count on from block to block, so that nothing must be
  // reset.
  struct Lanes {
    u32 step = 0;                       // every bar.warp.sync begins another step, whatever its mask
    u32 whole = 0;                      // all lanes come after what all did before this step
    u32 comes_after[kLanes][kLanes]{};  // [a][b]: lane a comes after what b did before this step
  };

  Mark mark(const Warp& warp, const Instruction& ins, int lane, u8 bytes, Access access) const;
  // Returns whether the access comes before what lane `lane` of the warp does now.
  bool ordered(const Mark& before, const Warp& warp, int lane) const;
  // The same for accesses by lanes of the warp since its last barrier.
  bool ordered_in_warp(const Mark& before, const Lanes& lanes, int lane) const;
  bool conflicts(const Mark& before, const Mark& now, const Warp& warp, int lane) const;
  bool covers(const Clock& clock, const Mark& before) const;
  // Returns whether a write comes before what the asynchronous proxy does for this lane, or for all.
  bool ordered_for_proxy(const Mark& before, const Warp& warp, int lane) const;
  SharedWord& shared_word(u32 word);
  const char* kind_of(const Mark& before) const;
  // Reports a write that threads come after, but the asynchronous proxy does not.
  [[noreturn]] void report_unfenced(const Warp& warp, const Instruction& ins, int lane, u32 word) const;
  std::string actor_name(const Mark& before) const;
  // Adds to the warp's knowledge what its lanes know beyond it.
  void fold(const Warp& warp);
  void merge_lane(Knowledge& into, const Warp& warp, int lane) const;
  u32 epoch_of(const Warp& warp) const { return knows_[warp.index].all.epochs[warp.index]; }
  u16 products_of(const Warp& warp) const { return static_cast<u16>(warps_ + warp.index / kWarpsOfGroup); }
  u16 mbarrier_actor(u32 number) const { return static_cast<u16>(readers_ + number); }
  DeviceHalf& device_half(u64 half);
  void check_write(const Warp& warp, const Instruction& ins, int lane, u32 word, const Mark& now);
  [[noreturn]] void report(const Warp& warp, const Instruction& ins, int lane, const std::string& where,
                           const Mark& before, const char* what) const;

  u64 serial_ = 0, first_of_grid_ = 1;
  std::vector<SharedWord> words_;
  std::vector<Mark> reads_;  // for each word, one for each reader: warps, then warpgroups
  size_t warps_ = 0, readers_ = 0, actors_ = 0;
  std::vector<Knowledge> knows_;                        // what each warp knows
  std::vector<std::unique_ptr<Knowledge>> lanes_know_;  // what lanes know beyond that
  std::vector<Lanes> lanes_;
  // Reads of a word before the last ones of their warp, if lanes synchronise in parts.
  std::unordered_map<u32, std::vector<Mark>> earlier_reads_;
  Knowledge barriers_[kBarriers];  // what the arriving warps know
  struct Phases {
    Knowledge gathered, ended;  // knowledge of the current phase; of the last one
  };
  std::vector<std::unique_ptr<Phases>> mbarriers_;
  std::vector<Mark> initialisations_;  // of mbarriers
  std::unordered_map<u64, std::unique_ptr<Page>> pages_;
  Page* last_page_ = nullptr;  // kept because neighbouring lanes touch neighbouring words
  u64 last_number_ = 0;
};

}  // namespace ptx_machine
