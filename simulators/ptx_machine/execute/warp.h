// The state of threads while they run: 32 lanes of a warp side by side, registers as arrays of 32.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "decode/kernel.h"
#include "execute/mbarriers.h"
#include "execute/products.h"
#include "execute/warpgroups.h"
#include "types.h"

namespace ptx_machine {

struct Launch {
  u32 grid[3], block[3];
  u32 dynamic_shared = 0;
  std::vector<u8> parameters;
};

// An asynchronous copy on its way: `read` bytes are copied, and the rest up to `bytes` becomes zeros.
struct Copy {
  u32 to;  // offset in shared memory
  u32 bytes, read;
  const u8* from;
  u32 group;
};

// The values of Instruction::variant for barriers: kinds of votes, or an arrival that does not wait.
enum class BarrierKind : u8 { kSync, kAnd, kOr, kCount, kArrive };
constexpr u32 kBarriers = 16;

struct Block;

// What lanes wait for that gave way to others.
struct Awaited {
  enum What : u8 { kMbarrier, kRegisters, kProducts };
  const Instruction* instruction;
  u32 lanes;
  What what;
  u32 offset;  // where the mbarrier is
};

struct Warp {
  Block* block = nullptr;
  u32 index = 0;
  u8* registers = nullptr;
  const u8* constants = nullptr;
  u32* predicates = nullptr;
  u8* local = nullptr;

  u32 alive = 0;    // lanes that have not ended
  u32 current = 0;  // lanes that execute now, at pc
  u32 pc = 0;
  u32 next_pc = ~0u;  // the first place where the current lanes can meet others
  u32 parked = 0;     // lanes that are elsewhere, at lane_pc
  u32 waiting = 0;    // parked lanes that wait for others at a .sync
  u32 polling = 0;    // parked lanes that have waited for an mbarrier in vain, and let others run
  u32 lane_pc[kLanes];

  // kGaveWay means that no lane can go on before other warps have done something.
  enum class State : u8 { kRunning, kAtBarrier, kGaveWay, kDone } state = State::kRunning;
  // Where the warp waits: the instruction, the barrier's number, how many threads it expects, and the votes.
  const Instruction* barrier = nullptr;
  u32 barrier_number = 0, barrier_threads = 0, votes = 0;

  std::vector<Awaited> waits_for;  // what lanes have waited for since the warp ran last

  std::vector<Copy> copies[kLanes];
  u32 closed_groups[kLanes];
  Products products;
  u32 owned_registers = 0;  // registers of each thread, by setmaxnreg

  const void* source(u32 operand) const {
    return (operand & kMarked ? constants : registers) + (operand & ~kMarked);
  }
  template <class T>
  const T* source(const Instruction& instruction, int place) const {
    return static_cast<const T*>(source(instruction.operands[place]));
  }
  template <class T>
  T* target(const Instruction& instruction, int place) {
    return reinterpret_cast<T*>(registers + instruction.operands[place]);
  }
  // Returns the lanes in which a predicate is true; all lanes if the instruction names none.
  u32 predicate(u32 operand) const {
    if (operand == kNoOperand) return kWholeWarp;
    return operand & kMarked ? ~predicates[operand & ~kMarked] : predicates[operand];
  }
  void set_predicate(u32 operand, u32 value, u32 mask) {
    if (operand != kNoOperand) predicates[operand] = (predicates[operand] & ~mask) | (value & mask);
  }

  // Runs the warp until it ends, comes to a barrier, or waits.
  void run();
  // For handlers. With an instruction of the kind kTest, these lanes let others run after the instruction;
  // with one of the kind kWholeWarp, the warp comes to the instruction again.
  void give_way(u32 lanes) { polling |= lanes; }
  void wait_for(const Instruction& instruction, u32 lanes, Awaited::What what, u32 offset = 0) {
    for (Awaited& known : waits_for) {
      if (known.instruction != &instruction || known.what != what || known.offset != offset) continue;
      known.lanes |= lanes;
      return;
    }
    waits_for.push_back({&instruction, lanes, what, offset});
  }
  // Lets lanes that gave way go on.
  void look_again();

 private:
  void park(u32 lanes, u32 at);
  void reschedule();
  // Returns whether the lanes in `needed` are all here; if not, the current ones wait and others run.
  bool together(const Instruction& instruction, u32 needed);
  // Execute an instruction of each kind; those that return bool say whether the warp goes on.
  void branch(const Instruction& instruction, u32 mask);
  void branch_by_table(const Instruction& instruction, u32 mask);
  bool end(const Instruction& instruction, u32 mask);
  bool arrive(const Instruction& instruction, u32 mask);
  void whole_warp(const Instruction& instruction, u32 mask);
  void some_lanes(const Instruction& instruction, u32 mask);
  void test(const Instruction& instruction, u32 mask);
  // Is called when no lane can run; gives way if lanes are polling.
  bool all_poll();
  // Returns the mask of a group that is complete among the lanes that come to a .sync, or else the first
  // lane's.
  u32 those_who_meet(const Instruction& instruction, u32 mask, const u32* members) const;
};

class Counts;
class Races;

struct Block {
  const Kernel* kernel = nullptr;
  const Launch* launch = nullptr;
  u32 id[3];
  u32 number = 0;  // the block's number in the grid
  u8* shared = nullptr;
  u32 shared_bytes = 0;
  Races* races = nullptr;    // null if races are not looked for
  Counts* counts = nullptr;  // null if nothing is counted
  std::vector<Warp> warps;
  // The threads that have arrived at a barrier without waiting there (bar.arrive), and how many it expects.
  struct Arrived {
    u32 threads = 0, expected = 0;
    const Warp* warp = nullptr;  // the last warp that arrived, and where
    const Instruction* instruction = nullptr;
  };
  Arrived arrived[kBarriers];
  Mbarriers mbarriers;
  std::vector<Warpgroup> warpgroups;
  u32 free_registers = 0;  // registers that setmaxnreg.dec has given up in the block
  u64 events = 0;          // grows with everything that a warp may wait for
};

// Is in execute/schedule.cpp. Runs warps in turn until all have ended; throws a report, also if something is
// left unfinished.
void run_warps(Block& block, u32 threads, u64& random_state);
// Returns the next number of a random sequence.
u32 draw(u64& state, u32 below);

// Runs all blocks; throws std::runtime_error with a report.
void execute(Kernel& kernel, const Launch& launch);

// Throws a report about these lanes at this instruction.
[[noreturn]] void fail(const Warp& warp, const Instruction& instruction, u32 lanes, const std::string& what);
// Returns lanes as a text like "0-3,7".
std::string lanes_text(u32 lanes);
// Returns the line of the PTX and that of the source.
std::string place_text(const Kernel& kernel, const Instruction& instruction);

}  // namespace ptx_machine
