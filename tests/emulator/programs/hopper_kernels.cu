// Small kernels with the instructions of ptx_sm90.cuh, wrong in one way each, on which
// tests/cuda/test_emulator_hopper.py sees every report of the emulator. `hopper_kernels NAME [right]` runs
// one, as it is or put right, and prints what it computed, or the report.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/dtype.h"
#include "cuda/common/ptx_sm90.cuh"

using selfattn::cuda::launch;
using selfattn::cuda::TensorMap;
using selfattn::cuda::TiledTensor;
namespace ptx = selfattn::cuda::ptx;

namespace {

constexpr int kGroup = 128;
constexpr int kThreads = 3 * kGroup;
// All matrices are of 64 rows and 64 columns, a panel each.
constexpr int kRows = 64;
constexpr int kPanelBytes = 64 * 128;
constexpr int kTiles = 4;
constexpr int kStages = 2;

using Results = float[kRows / 8][4];

struct Arguments {
  TensorMap map;         // of kTiles matrices, one below the other
  const uint16_t* rows;  // the same in memory
  float* out;            // kThreads
  int* counter;
  bool right;  // without the fault
};

struct Memory {
  unsigned char* panels;  // four of them, then
  uint64_t* full;         // kStages barriers
  uint64_t* empty;        // kStages barriers
};

__device__ Memory memory_of(unsigned char* start) {
  auto* const barriers = reinterpret_cast<uint64_t*>(start + 4 * kPanelBytes);
  return {start, barriers, barriers + kStages};
}

constexpr size_t kSharedBytes = 4 * kPanelBytes + 1024;

__device__ void init_barriers(const Memory& memory, int readers) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&memory.full[stage], 1);
      ptx::barrier_init(&memory.empty[stage], readers);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
}

// Matrix `tile` to a panel.
__device__ void copy_tile(const Arguments& arguments, unsigned char* panel, uint64_t* barrier, int tile) {
  ptx::barrier_arrive_expecting(barrier, kPanelBytes);
  ptx::copy_box_async(panel, &arguments.map, barrier, 0, tile * kRows, 0, 0);
}

// d = a b^T or d += a b^T, of the left operand's columns from 16 `step` on.
__device__ void multiply_step(Results& d, const unsigned char* a, const unsigned char* b, int step,
                              bool adds) {
  ptx::product_async<false, 64, false, false>(d, ptx::matrix_by_columns(a, kRows, 0, 16 * step),
                                              ptx::matrix_by_columns(b, kRows, 0, 16 * step), adds);
}

__device__ void multiply(Results& d, const unsigned char* a, const unsigned char* b, bool adds) {
  for (int step = 0; step < 4; ++step) multiply_step(d, a, b, step, adds || step > 0);
}

__device__ void write_out(const Arguments& arguments, const Results& d) {
  float sum = 0;
  for (int tile = 0; tile < kRows / 8; ++tile) {
    for (int r = 0; r < 4; ++r) sum += d[tile][r] * static_cast<float>(4 * tile + r + 1);
  }
  arguments.out[threadIdx.x] = sum;
}

// One group copies tiles, two others multiply each with itself and add the products.
enum class Fault { kNone, kFullNotWaitedFor, kEmptyNotWaitedFor, kReleasedBeforeTheWait, kNotReleased };
__device__ void pipeline(const Arguments& arguments, unsigned char* shared, Fault fault) {
  const Memory memory = memory_of(shared);
  init_barriers(memory, 2 * kGroup);
  if (threadIdx.x < kGroup) {
    ptx::give_up_registers<40>();
    if (threadIdx.x != 0) return;
    for (int tile = 0; tile < kTiles; ++tile) {
      const int stage = tile % kStages;
      const uint32_t round = tile / kStages;
      if (fault != Fault::kEmptyNotWaitedFor) ptx::barrier_wait(&memory.empty[stage], (round & 1) ^ 1);
      copy_tile(arguments, memory.panels + stage * kPanelBytes, &memory.full[stage], tile);
    }
    return;
  }
  ptx::take_registers<232>();
  Results d{};
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    const uint32_t round = tile / kStages;
    const unsigned char* const panel = memory.panels + stage * kPanelBytes;
    if (fault != Fault::kFullNotWaitedFor || tile != 1) ptx::barrier_wait(&memory.full[stage], round & 1);
    ptx::products_fence();
    multiply(d, panel, panel, true);
    ptx::products_commit();
    if (fault == Fault::kReleasedBeforeTheWait) ptx::barrier_arrive(&memory.empty[stage]);
    ptx::products_wait<0>();
    const bool releases = fault != Fault::kReleasedBeforeTheWait && fault != Fault::kNotReleased;
    if (releases) ptx::barrier_arrive(&memory.empty[stage]);
  }
  ptx::products_touch(d);
  write_out(arguments, d);
}

__global__ void full_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kFullNotWaitedFor);
}

__global__ void empty_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kEmptyNotWaitedFor);
}

__global__ void released_before_the_wait(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kReleasedBeforeTheWait);
}

__global__ void not_released(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  pipeline(arguments, shared, arguments.right ? Fault::kNone : Fault::kNotReleased);
}

// Barriers, one step of a pipeline each.

// Copies one tile, and waits for it; `bytes`: announced.
__device__ float one_tile(const Arguments& arguments, const Memory& memory, int bytes, unsigned char* panel) {
  if (threadIdx.x == 0) {
    if (bytes > 0) {
      ptx::barrier_arrive_expecting(memory.full, bytes);
    } else {
      ptx::barrier_arrive(memory.full);
    }
    ptx::copy_box_async(panel, &arguments.map, memory.full, 0, 0, 0, 0);
  }
  ptx::barrier_wait(memory.full, 0);
  return selfattn::float_from_float16(reinterpret_cast<const uint16_t*>(panel)[threadIdx.x]);
}

__global__ void barrier_not_initialised(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  if (arguments.right) init_barriers(memory, 1);
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void barrier_initialised_again(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0 && !arguments.right) ptx::barrier_init(memory.full, 1);
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void barrier_not_known_to_copies(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  if (threadIdx.x == 0) ptx::barrier_init(memory.full, 1);
  if (threadIdx.x == 0 && arguments.right) ptx::barrier_init_fence();
  __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

// Under some schedules others come to a barrier that is not there yet; under others that is a race.
__global__ void barrier_not_known_to_threads(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  if (threadIdx.x == 0) {
    ptx::barrier_init(memory.full, 1);
    ptx::barrier_init_fence();
  }
  if (arguments.right) __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void barrier_written_over(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0 && !arguments.right) *memory.full = 1;
  __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

__global__ void too_many_arrivals(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    ptx::barrier_arrive_expecting(memory.full, kPanelBytes);
    if (!arguments.right) ptx::barrier_arrive(memory.full);
    ptx::copy_box_async(memory.panels, &arguments.map, memory.full, 0, 0, 0, 0);
  }
  ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void too_few_bytes_announced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, arguments.right ? kPanelBytes : kPanelBytes / 2, memory.panels);
}

__global__ void too_many_bytes_announced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, arguments.right ? kPanelBytes : kPanelBytes + 128, memory.panels);
}

__global__ void bytes_not_announced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    ptx::copy_box_async(memory.panels, &arguments.map, memory.full, 0, 0, 0, 0);
    ptx::barrier_arrive_expecting(memory.full, arguments.right ? kPanelBytes : 0);
  }
  ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void barrier_misaligned(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  Memory memory = memory_of(shared);
  if (!arguments.right)
    memory.full = reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(memory.full) + 4);
  if (threadIdx.x == 0) ptx::barrier_init(memory.full, 1);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void parity_beyond_one(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  ptx::barrier_wait(memory.full, arguments.right ? 1 : 3);
  arguments.out[threadIdx.x] = threadIdx.x;
}

// Copies.

__global__ void box_misaligned(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, kPanelBytes, memory.panels + (arguments.right ? 1024 : 512));
}

__global__ void box_beyond_shared(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  arguments.out[threadIdx.x] =
      one_tile(arguments, memory, kPanelBytes, memory.panels + (arguments.right ? 3 : 4) * kPanelBytes);
}

__global__ void map_is_none(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    alignas(64) TensorMap other = arguments.map;
    if (!arguments.right) other.bytes[0] ^= 1;
    ptx::barrier_arrive_expecting(memory.full, kPanelBytes);
    ptx::copy_box_async(memory.panels, &other, memory.full, 0, 0, 0, 0);
  }
  ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void copy_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) copy_tile(arguments, memory.panels, memory.full, 0);
  if (arguments.right) ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void copy_read_early(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) copy_tile(arguments, memory.panels, memory.full, 0);
  __syncthreads();
  if (arguments.right) ptx::barrier_wait(memory.full, 0);
  const uint16_t element = reinterpret_cast<const uint16_t*>(memory.panels)[threadIdx.x];
  if (!arguments.right) ptx::barrier_wait(memory.full, 0);
  arguments.out[threadIdx.x] = selfattn::float_from_float16(element);
}

// A later copy, counted by another barrier, may come first.
__global__ void other_copy_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    copy_tile(arguments, memory.panels, &memory.full[0], 0);
    copy_tile(arguments, memory.panels + kPanelBytes, &memory.full[1], 1);
  }
  ptx::barrier_wait(&memory.full[1], 0);
  if (arguments.right) ptx::barrier_wait(&memory.full[0], 0);
  const uint16_t element = reinterpret_cast<const uint16_t*>(memory.panels)[threadIdx.x];
  if (!arguments.right) ptx::barrier_wait(&memory.full[0], 0);
  arguments.out[threadIdx.x] = selfattn::float_from_float16(element);
}

// Threads write what products read, or copies write over.

__device__ void write_panel(unsigned char* panel, const uint16_t* rows, int number) {
  for (int element = number; element < kRows * 64; element += kGroup) {
    const int row = element / 64, column = element % 64;
    const int chunk = column / 8 ^ row % 8;
    reinterpret_cast<uint16_t*>(panel)[row * 64 + chunk * 8 + column % 8] = rows[element];
  }
}

__device__ void written_operand(const Arguments& arguments, unsigned char* shared, bool fences, bool waits) {
  if (threadIdx.x >= kGroup) return;
  write_panel(shared, arguments.rows, threadIdx.x);
  if (fences) ptx::fence_async_proxy();
  if (waits) ptx::sync_threads(1, kGroup);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void written_operand_not_fenced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  written_operand(arguments, shared, arguments.right, true);
}

__global__ void written_operand_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  written_operand(arguments, shared, true, arguments.right);
}

__global__ void copy_over_writes(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x < kGroup) write_panel(memory.panels, arguments.rows, threadIdx.x);
  if (arguments.right) ptx::fence_async_proxy();
  __syncthreads();
  arguments.out[threadIdx.x] = one_tile(arguments, memory, kPanelBytes, memory.panels);
}

// Threads overwrite what products still read.
__global__ void write_over_operand(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  if (threadIdx.x >= 2 * kGroup) return;
  if (threadIdx.x >= kGroup) {
    ptx::sync_threads(2, 2 * kGroup);
    write_panel(shared, arguments.rows, threadIdx.x - kGroup);
    return;
  }
  write_panel(shared, arguments.rows, threadIdx.x);
  ptx::fence_async_proxy();
  ptx::sync_threads(1, kGroup);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared, false);
  ptx::products_commit();
  if (!arguments.right) ptx::arrive_threads(2, 2 * kGroup);
  ptx::products_wait<0>();
  if (arguments.right) ptx::arrive_threads(2, 2 * kGroup);
  write_out(arguments, d);
}

// Products. A group that loads both operands first.

__device__ void load_operands(const Arguments& arguments, unsigned char* shared) {
  const Memory memory = memory_of(shared);
  init_barriers(memory, 1);
  if (threadIdx.x == 0) {
    for (int n = 0; n < kStages; ++n) copy_tile(arguments, shared + n * kPanelBytes, &memory.full[n], n);
  }
  for (int n = 0; n < kStages; ++n) ptx::barrier_wait(&memory.full[n], 0);
}

__global__ void products_without_fence(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  if (arguments.right) ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void products_without_second_fence(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  for (int n = 0; n < 2; ++n) {
    if (n > 0 && arguments.right) ptx::products_fence();
    multiply(d, shared, shared + kPanelBytes, n > 0);
    ptx::products_commit();
    ptx::products_wait<0>();
    for (auto& tile : d) tile[0] *= 2;
  }
  write_out(arguments, d);
}

__global__ void products_not_waited_for(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  if (arguments.right) ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void products_not_committed(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  if (arguments.right) ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

// Waits for the first of two groups only, and then uses the results of the second.
__global__ void newest_group_pending(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results first, second;
  ptx::products_fence();
  multiply(first, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  multiply(second, shared, shared, false);
  ptx::products_commit();
  if (arguments.right) {
    ptx::products_wait<0>();
  } else {
    ptx::products_wait<1>();
  }
  for (int tile = 0; tile < kRows / 8; ++tile) first[tile][0] += second[tile][0];
  write_out(arguments, first);
  if (!arguments.right) ptx::products_wait<0>();
}

__global__ void results_written_early(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  if (!arguments.right && threadIdx.x == 70) d[3][1] = 5;
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void left_operand_written_early(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  uint32_t a[4] = {0x3c003c00u, 0x40003c00u, 0x3c004000u, 0x3c003c00u};  // ones and twos
  ptx::products_fence();
  ptx::product_async<false, 64, true>(d, a, ptx::matrix_by_rows(shared, kRows, 16, 0), false);
  ptx::products_commit();
  if (!arguments.right && threadIdx.x == 70) a[2] = 0;
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void group_diverges(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  const bool other = threadIdx.x / 32 == 2 && !arguments.right;
  multiply(d, shared + (other ? kPanelBytes : 0), shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void group_in_two_places(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  if (threadIdx.x / 32 == 2 && !arguments.right) ptx::products_commit();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void warp_leaves_products(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  if (threadIdx.x / 32 == 6 && !arguments.right) return;
  Results d;
  ptx::products_fence();
  multiply(d, shared, shared + kPanelBytes, false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void matrix_beyond_panel(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  ptx::product_async<false, 64, false, false>(
      d, ptx::matrix_by_columns(shared, kRows, arguments.right ? 0 : 8, 0),
      ptx::matrix_by_columns(shared, kRows, 0, 0), false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void matrix_turned(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  load_operands(arguments, shared);
  Results d;
  ptx::products_fence();
  const uint64_t b_matrix = arguments.right ? ptx::matrix_by_columns(shared, kRows, 0, 0)
                                            : ptx::matrix_by_rows(shared, kRows, 0, 0);
  ptx::product_async<false, 64, false, false>(d, ptx::matrix_by_columns(shared, kRows, 0, 0), b_matrix,
                                              false);
  ptx::products_commit();
  ptx::products_wait<0>();
  write_out(arguments, d);
}

__global__ void matrix_misplaced(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  arguments.out[threadIdx.x] = threadIdx.x;
  ptx::matrix_by_columns(shared, kRows, 0, arguments.right ? 16 : 8);
}

// Barriers of some warps.

__global__ void threads_differ(const __grid_constant__ Arguments arguments) {
  ptx::sync_threads(3, threadIdx.x < kGroup || arguments.right ? kThreads : kThreads - 64);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void half_arrived(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < kGroup) ptx::arrive_threads(3, kThreads);
  if (threadIdx.x >= kGroup && arguments.right) ptx::sync_threads(3, kThreads);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void nobody_arrives(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < kGroup) ptx::sync_threads(3, kThreads);
  if (threadIdx.x >= kGroup && arguments.right) ptx::arrive_threads(3, kThreads);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void number_of_no_barrier(const __grid_constant__ Arguments arguments) {
  ptx::sync_threads(arguments.right ? 15 : 16, kThreads);
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void threads_of_no_warps(const __grid_constant__ Arguments arguments) {
  ptx::sync_threads(1, arguments.right ? kThreads : kThreads - 16);
  arguments.out[threadIdx.x] = threadIdx.x;
}

// Who only arrives knows nothing of the others.
__global__ void arrived_without_waiting(const __grid_constant__ Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(shared);
  auto* const words = reinterpret_cast<float*>(shared);
  words[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (threadIdx.x < kGroup && !arguments.right) {
    ptx::arrive_threads(1, kThreads);
  } else {
    ptx::sync_threads(1, kThreads);
  }
  arguments.out[threadIdx.x] = words[(threadIdx.x + kGroup) % kThreads];
}

// Registers.

__global__ void registers_not_given_up(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x >= kGroup) {
    ptx::take_registers<232>();
  } else if (arguments.right) {
    ptx::give_up_registers<40>();
  }
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void registers_of_one_warp(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < (arguments.right ? kGroup : 32)) ptx::give_up_registers<40>();
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void registers_beyond(const __grid_constant__ Arguments arguments) {
  if (arguments.right) {
    ptx::give_up_registers<40>();
  } else {
    ptx::give_up_registers<44>();
  }
  arguments.out[threadIdx.x] = threadIdx.x;
}

// Two blocks count.
__global__ void counted_by_two_blocks(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x != 0) return;
  if (arguments.right) {
    atomicAdd(arguments.counter, 1);
  } else {
    *arguments.counter += 1;
  }
}

struct Named {
  const char* name;
  void (*kernel)(Arguments);
  int blocks;
};

#define SELFATTN_KERNEL(name, blocks) {#name, name, blocks}
const Named kKernels[] = {
    SELFATTN_KERNEL(full_not_waited_for, 1),
    SELFATTN_KERNEL(empty_not_waited_for, 1),
    SELFATTN_KERNEL(released_before_the_wait, 1),
    SELFATTN_KERNEL(not_released, 1),
    SELFATTN_KERNEL(barrier_not_initialised, 1),
    SELFATTN_KERNEL(barrier_initialised_again, 1),
    SELFATTN_KERNEL(barrier_not_known_to_copies, 1),
    SELFATTN_KERNEL(barrier_not_known_to_threads, 1),
    SELFATTN_KERNEL(barrier_written_over, 1),
    SELFATTN_KERNEL(too_many_arrivals, 1),
    SELFATTN_KERNEL(too_few_bytes_announced, 1),
    SELFATTN_KERNEL(too_many_bytes_announced, 1),
    SELFATTN_KERNEL(bytes_not_announced, 1),
    SELFATTN_KERNEL(barrier_misaligned, 1),
    SELFATTN_KERNEL(parity_beyond_one, 1),
    SELFATTN_KERNEL(box_misaligned, 1),
    SELFATTN_KERNEL(box_beyond_shared, 1),
    SELFATTN_KERNEL(map_is_none, 1),
    SELFATTN_KERNEL(copy_not_waited_for, 1),
    SELFATTN_KERNEL(copy_read_early, 1),
    SELFATTN_KERNEL(other_copy_waited_for, 1),
    SELFATTN_KERNEL(written_operand_not_fenced, 1),
    SELFATTN_KERNEL(written_operand_not_waited_for, 1),
    SELFATTN_KERNEL(copy_over_writes, 1),
    SELFATTN_KERNEL(write_over_operand, 1),
    SELFATTN_KERNEL(products_without_fence, 1),
    SELFATTN_KERNEL(products_without_second_fence, 1),
    SELFATTN_KERNEL(products_not_waited_for, 1),
    SELFATTN_KERNEL(products_not_committed, 1),
    SELFATTN_KERNEL(newest_group_pending, 1),
    SELFATTN_KERNEL(results_written_early, 1),
    SELFATTN_KERNEL(left_operand_written_early, 1),
    SELFATTN_KERNEL(group_diverges, 1),
    SELFATTN_KERNEL(group_in_two_places, 1),
    SELFATTN_KERNEL(warp_leaves_products, 1),
    SELFATTN_KERNEL(matrix_beyond_panel, 1),
    SELFATTN_KERNEL(matrix_turned, 1),
    SELFATTN_KERNEL(matrix_misplaced, 1),
    SELFATTN_KERNEL(threads_differ, 1),
    SELFATTN_KERNEL(half_arrived, 1),
    SELFATTN_KERNEL(nobody_arrives, 1),
    SELFATTN_KERNEL(number_of_no_barrier, 1),
    SELFATTN_KERNEL(threads_of_no_warps, 1),
    SELFATTN_KERNEL(arrived_without_waiting, 1),
    SELFATTN_KERNEL(registers_not_given_up, 1),
    SELFATTN_KERNEL(registers_of_one_warp, 1),
    SELFATTN_KERNEL(registers_beyond, 1),
    SELFATTN_KERNEL(counted_by_two_blocks, 2),
};
#undef SELFATTN_KERNEL

template <class T>
T* aligned_memory(size_t count) {
  void* const memory = std::aligned_alloc(512, (count * sizeof(T) + 511) / 512 * 512);
  std::memset(memory, 0, count * sizeof(T));
  return static_cast<T*>(memory);
}

TensorMap map_of(const uint16_t* rows, int64_t stride) {
  TiledTensor tensor;
  tensor.data = rows;
  const int64_t sizes[4] = {64, kTiles * kRows, 1, 1};
  const int64_t strides[4] = {1, stride, kTiles * kRows * stride, kTiles * kRows * stride};
  for (int n = 0; n < 4; ++n) {
    tensor.sizes[n] = sizes[n];
    tensor.strides[n] = strides[n];
  }
  tensor.box_rows = kRows;
  return selfattn::cuda::tensor_map(tensor);
}

}  // namespace

// `hopper_kernels NAME [right]`, or `hopper_kernels map`: a map that the driver refuses.
int main(int count, char** words) {
  auto* const rows = aligned_memory<uint16_t>(kTiles * kRows * 64);
  for (int n = 0; n < kTiles * kRows * 64; ++n)
    rows[n] = selfattn::float16_from_float(static_cast<float>((n * 37 + n / 11 * 5) % 9 - 4));
  Arguments arguments{};
  arguments.rows = rows;
  arguments.out = aligned_memory<float>(kThreads);
  arguments.counter = aligned_memory<int>(1);
  arguments.right = count > 2 && std::strcmp(words[2], "right") == 0;
  try {
    if (count > 1 && std::strcmp(words[1], "map") == 0) map_of(rows, 68);
    arguments.map = map_of(rows, 64);
    for (const Named& named : kKernels) {
      if (count < 2 || std::strcmp(words[1], named.name) != 0) continue;
      launch(named.kernel, dim3(named.blocks), dim3(kThreads), kSharedBytes, nullptr, arguments);
      for (int n = 0; n < kThreads; ++n) std::printf("%g ", static_cast<double>(arguments.out[n]));
      std::printf("%d\n", *arguments.counter);
      return 0;
    }
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "which kernel?\n");
  return 2;
}
