// Wrong kernels with Hopper's instructions, each of which the PTX machine must report. `hopper_wrong NAME`
// runs one, `hopper_wrong right` runs their parts without a fault, `hopper_wrong names` lists them.
#include "hopper_host.h"

namespace hopper {

namespace {

#define HOPPER_FAULTS(apply)                                                                                 \
  apply(right) apply(expect_missing) apply(expect_too_much) apply(full_wait_missing) apply(                  \
      full_wait_parity) apply(empty_wait_missing) apply(empty_arrival_missing) apply(empty_arrival_twice)    \
      apply(empty_arrival_early) apply(empty_arrival_before_products) apply(barrier_not_initialised) apply(  \
          barrier_initialised_twice) apply(barrier_misaligned) apply(barrier_overwritten)                    \
          apply(barrier_for_none) apply(barrier_fence_missing) apply(bytes_beyond_count) apply(              \
              copy_misaligned) apply(copy_beyond_shared) apply(copy_beyond_tensor) apply(copy_of_freed)      \
              apply(map_is_none) apply(map_in_local_memory) apply(copy_in_the_end) apply(                    \
                  products_fence_missing) apply(products_fence_missing_again) apply(products_wait_missing)   \
                  apply(products_commit_missing) apply(products_wait_for_one_less) apply(left_touched)       \
                      apply(results_of_other_width) apply(proxy_fence_missing) apply(                        \
                          proxy_fence_behind_barrier) apply(copy_over_writes) apply(written_under_products)  \
                          apply(warp_without_product) apply(warps_with_other_matrices)                       \
                              apply(warpgroup_of_two) apply(matrix_not_swizzled) apply(matrix_beyond_shared) \
                                  apply(matrix_within_pattern) apply(matrix_with_base_offset)                \
                                      apply(matrix_across_rows) apply(registers_without_end)                 \
                                          apply(registers_of_one_warp) apply(registers_grow_by_giving_up)    \
                                              apply(arrival_left_behind) apply(counts_differ) apply(         \
                                                  reads_not_passed_on) apply(copy_over_unfenced_writes)      \
                                                  apply(warp_waits_before_product) apply(parity_of_two)      \
                                                      apply(wait_not_passed_on) apply(reads_passed_on)       \
                                                          apply(wait_passed_on) apply(expect_too_little)     \
                                                              apply(products_left_in_the_end)                \
                                                                  apply(barrier_not_passed_on)               \
                                                                      apply(own_not_passed_on)               \
                                                                          apply(warp_leaves_before_product)

enum Fault {
#define HOPPER_NAME(name) k_##name,
  HOPPER_FAULTS(HOPPER_NAME)
#undef HOPPER_NAME
};

constexpr int kTiles = 4, kTileBytes = 64 * 128, kThreads = 256;

// The first warpgroup brings tiles, one after the other into one place. The second multiplies each tile by
// itself, and by what it has written itself.
template <int kFault>
__device__ void run(const TensorMap* map, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t barriers[4];
  unsigned char* const tile = memory;
  unsigned char* const own = memory + kTileBytes;
  uint64_t *const full = barriers, *const empty = barriers + 1;
  const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32;
  if (threadIdx.x == 0) {
    if (kFault != k_barrier_not_initialised) ptx::barrier_init(full, 1);
    if (kFault == k_barrier_initialised_twice) ptx::barrier_init(full, 1);
    ptx::barrier_init(empty, kFault == k_barrier_for_none ? 0 : 128);
    if (kFault != k_barrier_fence_missing) ptx::barrier_init_fence();
    if (kFault == k_barrier_overwritten) full[0] = 5;
  }
  if (kFault == k_copy_over_unfenced_writes) reinterpret_cast<uint32_t*>(tile)[threadIdx.x] = 0;
  if (kFault != k_barrier_not_passed_on) __syncthreads();

  if (threadIdx.x < 128) {
    if (kFault == k_registers_grow_by_giving_up) {
      ptx::give_up_registers<256>();
    } else if (kFault != k_registers_without_end && (kFault != k_registers_of_one_warp || warp == 1)) {
      ptx::give_up_registers<24>();
    }
    if (threadIdx.x == 0) {
      for (int n = 0; n < kTiles; ++n) {
        if (kFault != k_empty_wait_missing) ptx::barrier_wait(empty, static_cast<uint32_t>((n + 1) & 1));
        if (kFault == k_expect_missing) {
          ptx::barrier_arrive(full);
        } else if (kFault == k_bytes_beyond_count) {
          ptx::barrier_arrive_expecting(full, 1 << 21);
        } else {
          const int more = kFault == k_expect_too_much ? 64 : kFault == k_expect_too_little ? -64 : 0;
          ptx::barrier_arrive_expecting(full, kTileBytes + more);
        }
        unsigned char* to = tile;
        if (kFault == k_copy_misaligned) to += 512;
        if (kFault == k_copy_beyond_shared) to += 2 * kTileBytes;
        if (kFault == k_copy_over_writes) to += kTileBytes;
        uint64_t* barrier = full;
        if (kFault == k_barrier_misaligned)
          barrier = reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(full) + 4);
        ptx::copy_box_async(to, map, barrier, 0, n * 64, 0, 0);
      }
      if (kFault == k_copy_in_the_end) {
        ptx::barrier_wait(empty, static_cast<uint32_t>((kTiles + 1) & 1));
        ptx::barrier_arrive_expecting(full, kTileBytes);
        ptx::copy_box_async(tile, map, full, 0, 0, 0, 0);
      }
    }
    if (kFault == k_counts_differ) ptx::arrive_threads(2, 128);
    return;
  }
  if (kFault == k_registers_without_end) {
    ptx::take_registers<256>();
  }
  auto* const words = reinterpret_cast<uint32_t*>(own);
  for (int n = thread; n < kTileBytes / 4; n += 128) words[n] = 0x3f803f80u;  // two ones
  if (kFault != k_proxy_fence_missing && kFault != k_proxy_fence_behind_barrier) ptx::fence_async_proxy();
  if (kFault == k_counts_differ) {
    ptx::sync_threads(2, 256);
  } else if (kFault != k_own_not_passed_on) {
    ptx::sync_threads(1, 128);
  }
  if (kFault == k_proxy_fence_behind_barrier && warp == 0) ptx::fence_async_proxy();

  float d[8][4], e[12][4];
  for (auto& part : d) {
    for (float& number : part) number = 0.0f;
  }
  for (auto& part : e) {
    for (float& number : part) number = 0.0f;
  }
  uint32_t left[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  for (int n = 0; n < kTiles; ++n) {
    // One lane waits, or tells the others what all have read: the lanes must synchronise in between.
    const bool by_one = kFault == k_wait_not_passed_on || kFault == k_wait_passed_on;
    const bool plain = by_one || kFault == k_reads_not_passed_on || kFault == k_reads_passed_on;
    if (kFault != k_full_wait_missing && (!by_one || thread % 32 == 0)) {
      const int parity = (n + (kFault == k_full_wait_parity && n == 1 ? 1 : 0)) & 1;
      ptx::barrier_wait(full, static_cast<uint32_t>(kFault == k_parity_of_two ? n : parity));
    }
    if (kFault == k_wait_passed_on) __syncwarp();
    if (plain) {
      e[0][0] += reinterpret_cast<const float*>(tile)[thread];
      if (kFault != k_reads_not_passed_on) __syncwarp();
      if (thread % 32 == 0) {
        for (int lane = 0; lane < 32; ++lane) ptx::barrier_arrive(empty);
      }
      continue;
    }
    if (kFault == k_empty_arrival_before_products) ptx::barrier_arrive(empty);
    // Otherwise the compiler may put constants into registers after the fence.
    ptx::products_touch(d);
    ptx::products_touch(e);
    for (uint32_t& pair : left) asm volatile("" : "+r"(pair)::"memory");
    const bool fenced =
        kFault != k_products_fence_missing && (kFault != k_products_fence_missing_again || n == 0);
    if (fenced) ptx::products_fence();
    uint64_t a = ptx::matrix_by_columns(tile, 64, 0, 0);
    if (kFault == k_matrix_not_swizzled) a &= ~(uint64_t{3} << 62);
    if (kFault == k_matrix_beyond_shared) a = ptx::matrix_by_columns(memory + 2 * kTileBytes, 64, 0, 0);
    if (kFault == k_matrix_within_pattern) a += 256 >> 4;
    if (kFault == k_matrix_with_base_offset) a |= uint64_t{1} << 49;
    if (kFault == k_matrix_across_rows) a += 112 >> 4;
    if (kFault == k_warps_with_other_matrices && warp == 2) a += 2;
    if (kFault == k_warp_leaves_before_product && warp == 3) return;
    if (kFault == k_warp_waits_before_product && warp == 3)
      ptx::barrier_wait(empty, static_cast<uint32_t>(n & 1));
    if (kFault != k_warp_without_product || warp != 3) {
      ptx::product_async<true, 64, false, false>(d, a, ptx::matrix_by_columns(tile, 64, 0, 0), true);
    }
    ptx::product_async<true, 64, false>(d, left, ptx::matrix_by_columns(own, 64, 0, 16), true);
    if (kFault == k_results_of_other_width) {
      ptx::product_async<true, 64, false, true>(reinterpret_cast<float (&)[8][4]>(e), a,
                                                ptx::matrix_by_rows(tile, 32, 0, 0), true);
      ptx::product_async<true, 96, false, true>(e, a, ptx::matrix_by_rows(tile, 32, 0, 0), true);
    }
    if (kFault == k_left_touched) {
#pragma unroll
      for (uint32_t& pair : left) asm volatile("add.u32 %0, %0, 1;" : "+r"(pair)::"memory");
    }
    if (kFault == k_written_under_products) words[thread] = 0;
    if (kFault != k_products_commit_missing) ptx::products_commit();
    const bool early = kFault == k_empty_arrival_early && n >= 2;  // the earlier tiles are in order
    if (early) ptx::barrier_arrive(empty);
    if (kFault == k_products_wait_for_one_less) {
      ptx::products_wait<1>();
    } else if (kFault != k_products_wait_missing) {
      ptx::products_wait<0>();
    }
    ptx::products_touch(d);
    if (kFault == k_products_fence_missing_again) {
#pragma unroll
      for (auto& part : d) {
#pragma unroll
        for (float& number : part) number *= 0.5f;
      }
    }
    const bool arrives = !early && kFault != k_empty_arrival_before_products;
    if (arrives && kFault != k_empty_arrival_missing) ptx::barrier_arrive(empty);
    if (kFault == k_empty_arrival_twice) ptx::barrier_arrive(empty);
  }
  if (kFault == k_products_left_in_the_end) {
    ptx::products_fence();
    ptx::product_async<true, 64, false>(d, left, ptx::matrix_by_columns(own, 64, 0, 16), true);
    ptx::products_commit();
    return;
  }
  if (kFault == k_arrival_left_behind && warp == 1) ptx::arrive_threads(3, 64);
  float sum = e[0][0] + e[8][0];
  for (const auto& part : d) {
    for (const float number : part) sum += number;
  }
  out[thread] = sum;
}

template <int kFault>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ TensorMap map, float* out) {
  run<kFault>(&map, out);
}
// A copy of the map in the thread's memory.
template <int kFault>
__global__ void __launch_bounds__(kThreads) kernel_of_copy(TensorMap map, float* out) {
  map.bytes[127] = static_cast<unsigned char>(threadIdx.x);
  run<kFault>(&map, out);
}
// The block has no whole warpgroup.
__global__ void half_a_warpgroup(float* out) {
  ptx::products_fence();
  out[threadIdx.x] = 0;
}

template <int kFault>
void launch() {
  const int rows = kTiles * 64;
  std::vector<uint16_t> values;
  for (int n = 0; n < rows * 64; ++n) values.push_back(bits_of(small_number(static_cast<uint32_t>(n)), true));
  Tensor tensor{to_device(values), {64, rows, 1, 1}, {1, 64, rows * 64, rows * 64}};
  if (kFault == k_copy_beyond_tensor) tensor.sizes[1] = rows + 1, tensor.data += 64;
  TensorMap map = map_of(tensor, 64, true);
  if (kFault == k_map_is_none) map.bytes[20] ^= 1;
  if (kFault == k_copy_of_freed) check(cudaFree(tensor.data));
  float* const out = allocate<float>(128);
  constexpr int kBytes = 2 * kTileBytes;
  if (kFault == k_warpgroup_of_two) {
    half_a_warpgroup<<<1, 64>>>(out);
  } else if (kFault == k_map_in_local_memory) {
    kernel_of_copy<kFault><<<1, kThreads, kBytes>>>(map, out);
  } else {
    kernel<kFault><<<1, kThreads, kBytes>>>(map, out);
  }
  check(cudaGetLastError());
  for (const float number : to_host(out, 128)) std::printf("%g ", number);
  std::printf("\n");
}

struct Named {
  const char* name;
  void (*launch)();
};
#define HOPPER_ENTRY(name) {#name, launch<k_##name>},
const Named kKernels[] = {HOPPER_FAULTS(HOPPER_ENTRY)};

}  // namespace

}  // namespace hopper

int main(int count, char** words) {
  const char* const wanted = count > 1 ? words[1] : "";
  for (const hopper::Named& named : hopper::kKernels) {
    if (std::strcmp(wanted, "names") == 0) std::printf("%s\n", named.name);
    if (std::strcmp(wanted, named.name) != 0) continue;
    named.launch();
    return 0;
  }
  return std::strcmp(wanted, "names") == 0 ? 0 : 2;
}
