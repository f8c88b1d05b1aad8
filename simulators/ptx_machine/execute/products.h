// The products of a warpgroup (wgmma) that a warp has begun and not waited for. They read shared memory, and
// all four warps' parts are computed, when the first warp of the warpgroup waits for them. That warp waits
// until the others have begun them: all four warps do a product together, so that one thread may tell others
// that its operands can be overwritten.
//
// Until then nothing may touch registers of a product, results or operands. Because instructions that do are
// reported, results need not be NaN meanwhile. Registers that anything but a product has touched need a
// wgmma.fence before the next product that uses them.
#pragma once

#include <vector>

#include "types.h"

namespace ptx_machine {

struct Instruction;
struct Kernel;
struct Warp;

class Products {
 public:
  void start(const Kernel& kernel);
  // An instruction with touched_count, which is no product, touches its registers.
  void touch(const Warp& warp, const Instruction& ins, u32 mask);
  // Reports a warp whose lanes end too early.
  void end(const Warp& warp, const Instruction& ins, u32 mask) const;

  void fence() { ++fences_; }
  void begin(Warp& warp, const Instruction& ins, u64 left, u64 right, bool adds);
  void commit() { ++closed_; }
  // Waits until at most so many of the newest groups are unfinished; returns false if other warps must run
  // first.
  bool wait(Warp& warp, u32 groups);

 private:
  struct Pending {
    const Instruction* instruction;
    u64 left, right;  // descriptors
    bool adds;
    u32 group;
    bool done;
  };

  void check_registers(const Warp& warp, const Instruction& ins) const;
  // Computes the warp's part of the products before its nth one.
  void compute_before(Warp& warp, u32 nth);

  std::vector<Pending> pending_;
  // For each register of Kernel::product_registers: how many products use it, and which product has it as a
  // result.
  std::vector<u32> uses_;
  std::vector<const Instruction*> owners_;
  std::vector<u32> touched_;  // one more than the number of fences before the last touch
  u32 fences_ = 0, closed_ = 0;
  u32 begun_ = 0, left_ = 0;  // products; products that were waited for
};

}  // namespace ptx_machine
