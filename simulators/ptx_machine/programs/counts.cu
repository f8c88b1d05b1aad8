// Kernels whose counts are known by hand, for tests of SELFATTN_PTX_COUNTS: `counts NAME` launches one twice.
// What is counted stands in statements that the compiler leaves as they are; the tests do not compare
// addresses and branches, which the compiler makes.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "cuda/sm80/loads.cuh"
#include "cuda/sm80/sm80_config.cuh"

namespace ptx = selfattn::cuda::ptx;
namespace sm80 = selfattn::cuda::sm80;

namespace {

constexpr int kThreads = 64, kBlocks = 3;
constexpr int kWords = 32 * kThreads;  // words of each array
constexpr uint32_t kWholeWarp = 0xffffffffu;

// All blocks read the same words, 4 bytes a lane side by side, and each writes words of its own.
__global__ void coalesced(const uint32_t* in, uint32_t* out) {
  out[blockIdx.x * kThreads + threadIdx.x] = in[threadIdx.x];
}

// A load of 4 bytes in every 128, and a load of 16 bytes a lane side by side: both take 8 sectors.
__global__ void strided(const uint32_t* in, uint32_t* out) {
  uint32_t words[4];
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(in + 4 * threadIdx.x));
  if (in[32 * threadIdx.x] + words[0] == 1) out[0] = 1;  // never happens, as they are 0
}

// Stores of 32 words of one bank; a load of neighbouring words, without a conflict; a load of the same 16
// bytes by all lanes.
__global__ void conflicted(const uint32_t*, uint32_t* out) {
  SELFATTN_DYNAMIC_SHARED(memory);
  auto* words = reinterpret_cast<volatile uint32_t*>(memory);
  words[32 * threadIdx.x] = threadIdx.x;
  __syncthreads();
  uint32_t sum = words[threadIdx.x];
  uint32_t same[4];
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(same[0]), "=r"(same[1]), "=r"(same[2]), "=r"(same[3])
               : "r"(ptx::shared_address(memory)));
  sum += same[0] + same[1] + same[2] + same[3];
  __syncthreads();
  if (sum == 1) out[0] = 1;
}

// Copies of 16 bytes a lane, half of which read nothing; ldmatrix of rows side by side; an mma; then one
// number for each block.
__global__ void tensor(const uint32_t* in, uint32_t* out) {
  SELFATTN_DYNAMIC_SHARED(memory);
  ptx::copy_async_16(memory + 16 * threadIdx.x, in + 4 * threadIdx.x, threadIdx.x < 32);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncthreads();
  uint32_t a[4];
  ptx::load_matrix_x4(a, memory + 16 * (threadIdx.x % 32));
  float sums[4] = {};
  const uint32_t b[2] = {a[0], a[1]};
  for (int n = 0; n < 5; ++n) ptx::multiply_bfloat16(sums, a, b);
  ptx::multiply_float16(sums, a, b);
  uint32_t packed = ptx::pack_bfloat16(sums[0], sums[1]);
  asm volatile("{\n .reg .u64 %wide;\n cvt.u64.u32 %wide, %0;\n cvt.u32.u64 %0, %wide;\n}" : "+r"(packed));
  packed = __shfl_xor_sync(kWholeWarp, packed, 1);
  if (threadIdx.x == 0) atomicAdd(out, packed);
}

// Four multiply-adds, a maximum and two exponentials.
__global__ void arithmetic(const uint32_t*, uint32_t* out) {
  float value = 0.5f;
#pragma unroll
  for (int n = 0; n < 4; ++n) asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(value));
  asm volatile("max.f32 %0, %0, %0;" : "+f"(value));
  value = ptx::exp2_approx(ptx::exp2_approx(value));
  out[threadIdx.x] = __float_as_uint(value);
}

// Eight rows of 64 numbers of float32, stored as the kernels for tensor cores store them, in three pieces for
// each number.
struct Pieces : sm80::Config<selfattn::DType::kFloat32, 64, sm80::Path::kOptions> {
  static constexpr int kThreads = 64;
};
__global__ void pieces(const uint32_t* in, uint32_t*) {
  SELFATTN_DYNAMIC_SHARED(memory);
  constexpr int kRows = 8, kPlane = kRows * Pieces::kDim * 2;
  const selfattn::cuda::mma::TileShare<Pieces, kRows, Pieces::kDim / 4> share;
#pragma unroll
  for (int i = 0; i < share.kPerLane; ++i) {
    const int chunk = share.chunk(i);
    const float4 x = reinterpret_cast<const float4*>(in)[share.row * (Pieces::kDim / 4) + chunk];
    sm80::store_pieces<Pieces, false>(memory, kPlane, share.row, chunk, x);
  }
}

struct Named {
  const char* name;
  void (*kernel)(const uint32_t*, uint32_t*);
};

const Named kKernels[] = {{"coalesced", coalesced}, {"strided", strided}, {"conflicted", conflicted},
                          {"tensor", tensor},       {"pieces", pieces},   {"arithmetic", arithmetic}};

}  // namespace

int main(int count, char** words) {
  uint32_t* memory = nullptr;
  if (cudaMalloc(&memory, 2 * kWords * sizeof(uint32_t)) != cudaSuccess) return 2;
  if (cudaMemset(memory, 0, 2 * kWords * sizeof(uint32_t)) != cudaSuccess) return 2;
  for (const Named& named : kKernels) {
    if (count < 2 || std::strcmp(words[1], named.name) != 0) continue;
    for (int n = 0; n < 2; ++n) {
      named.kernel<<<kBlocks, kThreads, kWords * sizeof(uint32_t)>>>(memory, memory + kWords);
    }
    return cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
  }
  std::fprintf(stderr, "which kernel?\n");
  return 2;
}
