// Runs the blocks of a launch one after the other. It prepares their memory and the state in which their
// warps begin.
#include <algorithm>

#include "decode/special_registers.h"
#include "decode/text.h"
#include "execute/counts.h"
#include "execute/races.h"
#include "execute/warp.h"
#include "options.h"

namespace ptx_machine {

namespace {

constexpr u8 kUnwritten = 0xff;  // NaN
constexpr size_t kAlignment = 128;
constexpr u32 kMultiprocessors = 132;  // the value of %nsmid

// A buffer that begins at a multiple of kAlignment, and keeps its memory from one launch to the next.
class Buffer {
 public:
  u8* of(size_t bytes) {
    if (bytes_.size() < bytes + kAlignment) bytes_.resize(bytes + kAlignment);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<u8*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  std::vector<u8> bytes_;
};

void fill_special_registers(Warp& warp) {
  const Block& block = *warp.block;
  const u32 *threads = block.launch->block, *blocks = block.launch->grid;
  for (const SpecialRegister& special : block.kernel->specials) {
    auto* lanes = reinterpret_cast<u32*>(warp.registers + special.offset);
    for (u32 l = 0; l < kLanes; ++l) {
      const u32 thread = warp.index * kLanes + l;
      const u32 up_to = static_cast<u32>((2ull << l) - 1);
      // The values are in the order of kSpecialRegisters.
      const u32 values[kSpecialRegisterCount] = {thread % threads[0],
                                                 thread / threads[0] % threads[1],
                                                 thread / (threads[0] * threads[1]),
                                                 threads[0],
                                                 threads[1],
                                                 threads[2],
                                                 block.id[0],
                                                 block.id[1],
                                                 block.id[2],
                                                 blocks[0],
                                                 blocks[1],
                                                 blocks[2],
                                                 l,
                                                 warp.index,
                                                 static_cast<u32>(block.warps.size()),
                                                 1u << l,
                                                 up_to,
                                                 up_to >> 1,
                                                 ~(up_to >> 1),
                                                 ~up_to,
                                                 block.number % kMultiprocessors,
                                                 kMultiprocessors,
                                                 0,
                                                 0,
                                                 block.launch->dynamic_shared,
                                                 options().left_out};
      lanes[l] = values[special.which];
    }
  }
}

void start_warp(Warp& warp, u32 threads) {
  const u32 lanes = std::min<u32>(kLanes, threads - kLanes * warp.index);
  warp.alive = warp.current = lanes == kLanes ? kWholeWarp : (1u << lanes) - 1;
  warp.pc = 0;
  warp.next_pc = ~0u;
  warp.parked = warp.waiting = warp.polling = 0;
  warp.state = Warp::State::kRunning;
  for (int l = 0; l < kLanes; ++l) {
    warp.copies[l].clear();
    warp.closed_groups[l] = 0;
  }
  warp.waits_for.clear();
  warp.products.start(*warp.block->kernel);
  warp.owned_registers = warp.block->kernel->registers_of_thread;
  fill_special_registers(warp);
}

}  // namespace

void execute(Kernel& kernel, const Launch& launch) {
  static Buffer registers, shared, local, constants;
  static Races races;
  const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
  const u32 warps = (threads + kLanes - 1) / kLanes;
  const size_t register_bytes = round_up(kernel.register_bytes, kAlignment);
  const size_t warp_bytes =
      register_bytes + (kernel.predicates + kAlignment - 1) / kAlignment * kAlignment * sizeof(u32);
  const size_t local_bytes = size_t{kernel.local_bytes} * kLanes;

  Block block;
  block.kernel = &kernel;
  block.launch = &launch;
  block.shared_bytes = kernel.static_shared + launch.dynamic_shared;
  block.shared = shared.of(block.shared_bytes);
  block.races = options().races ? &races : nullptr;
  block.counts = Counts::wanted();
  u8* const constant_bytes = constants.of(kernel.constants.size());
  std::copy(kernel.constants.begin(), kernel.constants.end(), constant_bytes);
  u8* const register_memory = registers.of(warp_bytes * warps);
  std::memset(register_memory, kUnwritten, warp_bytes * warps);
  u8* const local_memory = local.of(local_bytes * warps);
  block.warps.resize(warps);
  for (u32 n = 0; n < warps; ++n) {
    Warp& warp = block.warps[n];
    warp.block = &block;
    warp.index = n;
    warp.registers = register_memory + warp_bytes * n;
    warp.predicates = reinterpret_cast<u32*>(warp.registers + register_bytes);
    warp.constants = constant_bytes;
    warp.local = local_memory + local_bytes * n;
  }

  const u32* grid = launch.grid;
  const u64 blocks = u64{grid[0]} * grid[1] * grid[2];
  u64 random_state = options().schedule * 0x9e3779b97f4a7c15ull + 1;
  const u64 first =
      options().schedule == 0 ? 0 : draw(random_state, static_cast<u32>(std::min<u64>(blocks, ~0u)));
  races.start_grid();
  if (block.counts != nullptr) block.counts->start(kernel);
  for (u64 n = 0; n < blocks; ++n) {
    const u64 number = (first + n) % blocks;
    block.number = static_cast<u32>(number);
    block.id[0] = static_cast<u32>(number % grid[0]);
    block.id[1] = static_cast<u32>(number / grid[0] % grid[1]);
    block.id[2] = static_cast<u32>(number / (u64{grid[0]} * grid[1]));
    std::memset(block.shared, kUnwritten, block.shared_bytes);
    std::memset(local_memory, kUnwritten, local_bytes * warps);
    std::fill(std::begin(block.arrived), std::end(block.arrived), Block::Arrived());
    block.mbarriers.start_block();
    block.warpgroups.assign((warps + kWarpsOfGroup - 1) / kWarpsOfGroup, Warpgroup());
    block.free_registers = 0;
    if (block.races != nullptr) races.start_block(block);
    if (block.counts != nullptr) block.counts->start_block();
    for (Warp& warp : block.warps) start_warp(warp, threads);
    run_warps(block, threads, random_state);
  }
  if (block.counts != nullptr) block.counts->finish(kernel, launch);
}

}  // namespace ptx_machine
