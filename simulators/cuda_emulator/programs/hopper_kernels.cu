// Small kernels with the instructions of ptx_sm90.cuh, wrong in one way each. They cause every report of the
// emulator, in tests/cuda/test_emulator_hopper.py. `hopper_kernels NAME [right]` runs one, as it is or
// corrected, and prints what it computed, or the report.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/dtype.h"
#include "hopper/wrong_barriers.cuh"
#include "hopper/wrong_copies.cuh"
#include "hopper/wrong_products.cuh"
#include "hopper/wrong_warps.cuh"

using namespace hopper;
using selfattn::cuda::launch;
using selfattn::cuda::TiledTensor;

namespace {

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
