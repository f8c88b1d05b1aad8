// Kernels with features of the PTX machine that the package's kernels do not use. Their results are known:
// `features NAME` prints the words that one wrote, on a line.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 64;
constexpr uint32_t kWholeWarp = 0xffffffffu;

__constant__ uint32_t squares[8] = {0, 1, 4, 9, 16, 25, 36, 49};
__device__ uint32_t counter = 100;
__device__ float factors[3] = {0.5f, 2.0f};

// Variables of modules, with what they begin as: 4 + 100 (+ how many came before), factors[1] and factors[2].
__global__ void variables(uint32_t* out) {
  const uint32_t before = threadIdx.x == 0 ? atomicAdd(&counter, 7) : 0;
  out[threadIdx.x] = squares[threadIdx.x % 8] + before + static_cast<uint32_t>(factors[1] * 8 + factors[2]);
}

// Wrong: the last threads read beyond the end.
__global__ void variables_beyond(uint32_t* out) { out[threadIdx.x] = squares[threadIdx.x / 7]; }

// The first warp writes and arrives; the second warp waits for it.
template <bool kEarly>
__device__ void arrive(uint32_t* out) {
  __shared__ uint32_t words[32];
  if (threadIdx.x < 32) {
    if (kEarly) asm volatile("bar.arrive 1, 64;" ::: "memory");
    words[threadIdx.x] = threadIdx.x + 1;
    if (!kEarly) asm volatile("bar.arrive 1, 64;" ::: "memory");
    out[threadIdx.x] = 0;
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = words[63 - threadIdx.x];
  }
}
__global__ void arrival(uint32_t* out) { arrive<false>(out); }
// Wrong: what is written after the arrival may come after what is read.
__global__ void arrival_early(uint32_t* out) { arrive<true>(out); }
// Wrong: no warp arrives.
__global__ void arrival_missing(uint32_t* out) {
  if (threadIdx.x >= 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  out[threadIdx.x] = 0;
}

// Wrong: both warps arrive, and neither waits before it reads what the other one writes.
__global__ void arrival_of_both(uint32_t* out) {
  __shared__ uint32_t words[kThreads];
  words[threadIdx.x] = threadIdx.x;
  asm volatile("bar.arrive 1, 64;" ::: "memory");
  out[threadIdx.x] = words[63 - threadIdx.x];
}

// Wrong: barriers that there are not, of a part of a warp, and for fewer threads than come.
template <int kNumber, int kCount>
__global__ void barrier_of(uint32_t* out) {
  asm volatile("bar.sync %0, %1;" ::"r"(kNumber), "r"(kCount) : "memory");
  out[threadIdx.x] = 0;
}

// A .sync instruction with a guard, which half of the lanes pass.
template <uint32_t kMembers>
__device__ void vote_of_half(uint32_t* out) {
  uint32_t votes = 5;
  asm volatile(
      "{\n .reg .pred %first, %odd;\n setp.lt.u32 %first, %1, 16;\n and.b32 %0, %1, 1;\n"
      " setp.eq.u32 %odd, %0, 1;\n @%first vote.sync.ballot.b32 %0, %odd, %2;\n}"
      : "+r"(votes)
      : "r"(threadIdx.x % 32), "n"(kMembers));
  out[threadIdx.x] = votes;
}
__global__ void guarded(uint32_t* out) { vote_of_half<0xffff>(out); }
// Wrong: the instruction waits for the other half, too.
__global__ void guarded_for_all(uint32_t* out) { vote_of_half<kWholeWarp>(out); }

// The halves of each warp synchronise by themselves, in one place with masks of their own, and lanes read
// what their neighbours have written.
__device__ uint32_t half_of_warp() { return threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u; }
__device__ void halves_read(uint32_t* out, uint32_t distance) {
  __shared__ uint32_t words[kThreads];
  words[threadIdx.x] = threadIdx.x;
  __syncwarp(half_of_warp());
  out[threadIdx.x] = words[threadIdx.x ^ distance];
}
__global__ void halves(uint32_t* out) { halves_read(out, 8); }
// Wrong: the neighbour is in the other half.
__global__ void halves_beyond(uint32_t* out) { halves_read(out, 16); }

// Both halves read the upper half's words, the upper half twice, and then the upper half overwrites them.
template <bool kRight>
__device__ void overwrite(uint32_t* out) {
  __shared__ uint32_t words[kThreads];
  const bool upper = (threadIdx.x & 16) != 0;
  words[threadIdx.x] = threadIdx.x;
  __syncwarp();
  uint32_t sum = words[threadIdx.x | 16];
  __syncwarp(half_of_warp());
  if (upper) sum += words[threadIdx.x];
  if (kRight) __syncwarp();
  if (upper) words[threadIdx.x] = 0;
  out[threadIdx.x] = sum;
}
__global__ void overwritten(uint32_t* out) { overwrite<true>(out); }
// Wrong: nothing orders the lower half's reads, which are not the last ones, and the writes.
__global__ void overwritten_early(uint32_t* out) { overwrite<false>(out); }

// Lanes write 16-bit numbers of device memory, two in a word, read them and write them again.
template <uint32_t kDistance>
__device__ void write_half_words(uint32_t* out) {
  auto* numbers = reinterpret_cast<volatile uint16_t*>(out);
  for (uint32_t round = 0; round < 2; ++round) {
    numbers[threadIdx.x] = static_cast<uint16_t>(threadIdx.x + round);
    numbers[kThreads + threadIdx.x] = numbers[threadIdx.x ^ kDistance];
  }
}
__global__ void half_words(uint32_t* out) { write_half_words<0>(out); }
// Wrong: nothing orders a lane's write and what its neighbour reads.
__global__ void half_words_of_neighbours(uint32_t* out) { write_half_words<1>(out); }

// Wrong: lanes that meet, by their masks, have different masks.
__global__ void masks_differ(uint32_t* out) {
  __syncwarp(threadIdx.x % 32 < 16 ? kWholeWarp : 0xffff0000u);
  out[threadIdx.x] = 0;
}

// Both branches of an if have a collective of their own lanes. This works since compute capability 8.0.
__global__ void parts(uint32_t* out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const uint32_t lane = threadIdx.x % 32;
  if (lane < 8) {
    out[threadIdx.x] = __reduce_add_sync(0x000000ffu, lane);
  } else {
    out[threadIdx.x] = __reduce_max_sync(0xffffff00u, lane);
  }
#endif
}

__noinline__ __device__ uint32_t called(uint32_t value, const uint32_t* table) {
  uint32_t sum = 0;
  for (uint32_t n = 0; n <= value % 4; ++n) sum += table[n];
  return sum;
}

// A function that is called, with an array of its caller in local memory.
__global__ void calls(uint32_t* out) {
  uint32_t table[4];
  for (uint32_t n = 0; n < 4; ++n) table[n] = (n + 1) * (threadIdx.x + 1);
  out[threadIdx.x] = called(threadIdx.x, table);
}

// Labels have the same name in blocks of braces beside and within each other. The result is 1 for each of n +
// 1 rounds, and in each round 10 for each of three. Branches after the inner loop find the labels of the
// outer block.
__device__ uint32_t rounds_within_rounds(uint32_t n) {
  uint32_t sum = 0;
  asm volatile(
      "{\n .reg .pred goes_on;\n .reg .s32 left;\n mov.s32 left, %1;\n"
      "again:\n add.u32 %0, %0, 1;\n"
      " {\n .reg .s32 left;\n mov.s32 left, 2;\n"
      " again:\n add.u32 %0, %0, 10;\n setp.gt.s32 goes_on, left, 0;\n sub.s32 left, left, 1;\n"
      " @goes_on bra again;\n }\n"
      " {\n setp.le.s32 goes_on, left, 0;\n @goes_on bra ended;\n sub.s32 left, left, 1;\n bra again;\n }\n"
      "ended:\n}"
      : "+r"(sum)
      : "r"(n));
  return sum;
}
__global__ void labels(uint32_t* out) {
  out[threadIdx.x] = rounds_within_rounds(threadIdx.x % 4) + 1000 * rounds_within_rounds(1);
}

// A barrier that counts votes.
__global__ void votes(uint32_t* out) {
  const int count = __syncthreads_count(threadIdx.x % 3 == 0);
  out[threadIdx.x] = static_cast<uint32_t>(count) + (__all_sync(kWholeWarp, 1) ? 1000 : 0);
}

// Returns the architecture that the text was compiled for.
__global__ void generation(uint32_t* out) {
#ifdef __CUDA_ARCH__
  out[threadIdx.x] = __CUDA_ARCH__;
#endif
}

struct Named {
  const char* name;
  void (*kernel)(uint32_t*);
};

const Named kKernels[] = {{"variables", variables},
                          {"variables_beyond", variables_beyond},
                          {"arrival", arrival},
                          {"arrival_early", arrival_early},
                          {"arrival_missing", arrival_missing},
                          {"arrival_of_both", arrival_of_both},
                          {"barrier_of_no_number", barrier_of<16, 64>},
                          {"barrier_of_no_warps", barrier_of<1, 48>},
                          {"barrier_of_fewer", barrier_of<1, 32>},
                          {"guarded", guarded},
                          {"guarded_for_all", guarded_for_all},
                          {"halves", halves},
                          {"halves_beyond", halves_beyond},
                          {"overwritten", overwritten},
                          {"overwritten_early", overwritten_early},
                          {"half_words", half_words},
                          {"half_words_of_neighbours", half_words_of_neighbours},
                          {"masks_differ", masks_differ},
                          {"parts", parts},
                          {"calls", calls},
                          {"labels", labels},
                          {"votes", votes},
                          {"generation", generation}};

}  // namespace

int main(int count, char** words) {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, kThreads * sizeof(uint32_t), cudaHostAllocDefault) != cudaSuccess) return 2;
  auto* out = static_cast<uint32_t*>(memory);
  for (const Named& named : kKernels) {
    if (count < 2 || std::strcmp(words[1], named.name) != 0) continue;
    named.kernel<<<1, kThreads>>>(out);
    if (cudaGetLastError() != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return 1;
    for (int n = 0; n < kThreads; ++n) std::printf("%u ", out[n]);
    std::printf("\n");
    return 0;
  }
  std::fprintf(stderr, "which kernel?\n");
  return 2;
}
