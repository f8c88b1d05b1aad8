// Small kernels, most of them wrong in one way each. They cause reports of the PTX machine
// (tests/cuda/test_ptx_machine.py). `wrong_kernels NAME` runs one and prints its results or the report.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "cuda/common/ptx_sm80.cuh"

using selfattn::cuda::launch;
namespace ptx = selfattn::cuda::ptx;

namespace {

constexpr int kThreads = 64;
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Arguments that all kernels below take.
struct Arguments {
  const uint32_t* in;  // kThreads * 4 words, aligned to 16
  uint32_t* out;       // kThreads words
  bool right;          // whether to execute the statement that the wrong kernel lacks
};

// Each thread reads what its neighbour in the block has written.
__global__ void neighbour_in_block(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<uint32_t*>(memory);
  words[threadIdx.x] = arguments.in[threadIdx.x];
  if (arguments.right) __syncthreads();
  arguments.out[threadIdx.x] = words[(threadIdx.x + 32) % kThreads];
}

__global__ void neighbour_in_warp(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<uint32_t*>(memory);
  words[threadIdx.x] = arguments.in[threadIdx.x];
  if (arguments.right) __syncwarp();
  // Lanes run in step here, but nothing orders them.
  __shfl_sync(kWholeWarp, 0, 0);
  arguments.out[threadIdx.x] = words[threadIdx.x ^ 1];
}

// The block overwrites a buffer that some of its threads still read.
__global__ void buffer_reused(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<uint32_t*>(memory);
  words[threadIdx.x] = arguments.in[threadIdx.x];
  __syncthreads();
  const uint32_t other = words[(threadIdx.x + 32) % kThreads];
  if (arguments.right) __syncthreads();
  words[threadIdx.x] = other + 1;
  __syncthreads();
  arguments.out[threadIdx.x] = words[(threadIdx.x + 32) % kThreads];
}

__global__ void copy_not_waited_for(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  ptx::copy_async_16(memory + 16 * threadIdx.x, arguments.in + 4 * threadIdx.x, true);
  ptx::copy_async_commit();
  if (arguments.right) ptx::copy_async_wait<0>();
  __syncthreads();
  arguments.out[threadIdx.x] = reinterpret_cast<uint32_t*>(memory)[4 * ((threadIdx.x + 1) % kThreads)];
}

__global__ void copy_not_committed(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  ptx::copy_async_16(memory + 16 * threadIdx.x, arguments.in + 4 * threadIdx.x, true);
  if (arguments.right) ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  arguments.out[threadIdx.x] = reinterpret_cast<uint32_t*>(memory)[4 * threadIdx.x];
}

// The thread that copies waits for its copy, but no barrier tells the others.
__global__ void copy_without_barrier(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  ptx::copy_async_16(memory + 16 * threadIdx.x, arguments.in + 4 * threadIdx.x, true);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  if (arguments.right) __syncthreads();
  arguments.out[threadIdx.x] = reinterpret_cast<uint32_t*>(memory)[4 * (kThreads - 1 - threadIdx.x)];
}

// A thread copies into a buffer that others still read.
__global__ void copy_over_reads(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<uint32_t*>(memory);
  for (int n = 0; n < 4; ++n) words[4 * threadIdx.x + n] = n;
  __syncthreads();
  const uint32_t other = words[4 * ((threadIdx.x + 32) % kThreads)];
  if (arguments.right) __syncthreads();
  ptx::copy_async_16(memory + 16 * threadIdx.x, arguments.in + 4 * threadIdx.x, true);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  arguments.out[threadIdx.x] = other + words[4 * threadIdx.x];
}

// Both blocks write the same words.
__global__ void blocks_overlap(Arguments arguments) {
  if (arguments.right && blockIdx.x == 1) return;
  arguments.out[threadIdx.x] = arguments.in[threadIdx.x];
}

// Lanes of one warp come to two different collectives.
__global__ void warp_diverges(Arguments arguments) {
  const bool half = threadIdx.x % 32 < 16 && !arguments.right;
  arguments.out[threadIdx.x] =
      half ? __ballot_sync(kWholeWarp, 1) : __shfl_xor_sync(kWholeWarp, threadIdx.x, 1);
}

__global__ void warp_skips_barrier(Arguments arguments) {
  if (threadIdx.x < 32 || arguments.right) __syncthreads();
  arguments.out[threadIdx.x] = threadIdx.x;
}

__global__ void lane_leaves_shuffle(Arguments arguments) {
  if (threadIdx.x == 7 && !arguments.right) return;
  arguments.out[threadIdx.x] = __shfl_xor_sync(kWholeWarp, threadIdx.x, 1);
}

__global__ void mask_lacks_caller(Arguments arguments) {
  arguments.out[threadIdx.x] = __ballot_sync(arguments.right ? kWholeWarp : 0x0000ffffu, 1);
}

__global__ void write_beyond_shared(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<uint32_t*>(memory);
  words[threadIdx.x + (arguments.right ? 0 : 4 * kThreads)] = 1;
  arguments.out[threadIdx.x] = words[threadIdx.x];
}

__global__ void rows_beyond_shared(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  uint32_t registers[4];
  ptx::load_matrix_x4(registers, memory + 16 * (threadIdx.x % 32) + (arguments.right ? 0 : 1024));
  arguments.out[threadIdx.x] = registers[0];
}

__global__ void copy_misaligned(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  ptx::copy_async_16(memory + 16 * threadIdx.x, arguments.in + (arguments.right ? 0 : 1), true);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  arguments.out[threadIdx.x] = 0;
}

// Nothing has been written, so the memory holds NaN, 0xffffffff.
__global__ void shared_memory_not_written(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<uint32_t*>(memory);
  if (arguments.right) words[threadIdx.x] = 0;
  arguments.out[threadIdx.x] = words[threadIdx.x];
}

// Rows have 128 bytes, so the 8 rows of a matrix share their banks unless their chunks are swizzled.
__global__ void columns_of_rows(Arguments arguments) {
  SELFATTN_DYNAMIC_SHARED(memory);
  const int row = threadIdx.x % 8;
  for (int n = 0; n < 4; ++n) reinterpret_cast<uint32_t*>(memory)[4 * threadIdx.x + n] = n;
  __syncthreads();
  uint32_t registers[4];
  ptx::load_matrix_x4(registers, memory + 128 * row + 16 * (arguments.right ? row : 0));
  arguments.out[threadIdx.x] = registers[0];
}

struct Named {
  const char* name;
  void (*kernel)(Arguments);
  unsigned int blocks;
};

const Named kKernels[] = {
    {"neighbour_in_block", neighbour_in_block, 1},
    {"neighbour_in_warp", neighbour_in_warp, 1},
    {"buffer_reused", buffer_reused, 1},
    {"copy_not_waited_for", copy_not_waited_for, 1},
    {"copy_not_committed", copy_not_committed, 1},
    {"copy_without_barrier", copy_without_barrier, 1},
    {"copy_over_reads", copy_over_reads, 1},
    {"blocks_overlap", blocks_overlap, 2},
    {"warp_diverges", warp_diverges, 1},
    {"warp_skips_barrier", warp_skips_barrier, 1},
    {"lane_leaves_shuffle", lane_leaves_shuffle, 1},
    {"mask_lacks_caller", mask_lacks_caller, 1},
    {"write_beyond_shared", write_beyond_shared, 1},
    {"rows_beyond_shared", rows_beyond_shared, 1},
    {"copy_misaligned", copy_misaligned, 1},
    {"shared_memory_not_written", shared_memory_not_written, 1},
    {"columns_of_rows", columns_of_rows, 1},
};

// Words that the host and kernels share.
uint32_t* shared_words(size_t count) {
  void* words = nullptr;
  selfattn::cuda::check_cuda(cudaHostAlloc(&words, count * sizeof(uint32_t), cudaHostAllocDefault),
                             "allocate");
  return static_cast<uint32_t*>(words);
}

}  // namespace

// `wrong_kernels NAME [right] [shared memory in bytes]`
int main(int count, char** words) {
  uint32_t* const in = shared_words(4 * kThreads);
  uint32_t* const out = shared_words(kThreads);
  for (uint32_t n = 0; n < 4 * kThreads; ++n) in[n] = n;
  const bool right = count > 2 && std::strcmp(words[2], "right") == 0;
  const size_t shared_bytes = count > 3 ? std::stoul(words[3]) : 16 * kThreads;
  for (const Named& named : kKernels) {
    if (count < 2 || std::strcmp(words[1], named.name) != 0) continue;
    try {
      launch(named.kernel, dim3(named.blocks), dim3(kThreads), shared_bytes, nullptr,
             Arguments{in, out, right});
      selfattn::cuda::check_cuda(cudaDeviceSynchronize(), "run a kernel");
    } catch (const std::runtime_error& error) {
      std::printf("%s\n", error.what());
      return 1;
    }
    for (int n = 0; n < kThreads; ++n) std::printf("%u ", out[n]);
    std::printf("\n");
    return 0;
  }
  std::fprintf(stderr, "which kernel?\n");
  return 2;
}
