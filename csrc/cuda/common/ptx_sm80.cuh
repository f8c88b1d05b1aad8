// The instructions of sm_80 that CUDA C++ has no words for.
//
// This is the only file with inline PTX for them. simulators/ptx_machine/probe.py asks every function here
// for its results, on the PTX machine and on devices. On older devices the instructions trap; kernels that
// use them are never chosen there.
//
// Terms of the PTX manual: a "row" is one of the 8 rows of an 8 x 8 matrix of 16-bit elements, 16 bytes,
// aligned to 16. Fragments are laid out as there; "collective" calls are made by all 32 lanes of a warp
// together.
#pragma once

#include <cstdint>

#include "device.cuh"

namespace selfattn::cuda::ptx {

// Whether this is code for devices that have these instructions. Otherwise kernels are empty: they would take
// minutes to compile, and are never chosen.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kForAmpere = false;
#else
constexpr bool kForAmpere = true;
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define SELFATTN_PTX_SM80(...) __trap()
#else
#define SELFATTN_PTX_SM80(...) asm volatile(__VA_ARGS__)
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes from global to shared memory, both aligned to 16. If !valid it writes zeros and
// does not read `global`. This thread sees the bytes after copy_async_wait, the others after a barrier that
// follows it.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  SELFATTN_PTX_SM80("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                    "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// Closes a group of this thread's copies. The group may be empty.
__device__ __forceinline__ void copy_async_commit() {
  SELFATTN_PTX_SM80("cp.async.commit_group;" :: : "memory");
}

// Waits until all groups of this thread have arrived except the newest `Pending`.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  SELFATTN_PTX_SM80("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads four 8 x 8 matrices; lane l gives the row l % 8 of matrix l / 8. Register m of a lane gets the
// elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4 of matrix m. Collective.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  SELFATTN_PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]),
                    "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Does the same with each matrix transposed. Collective.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  SELFATTN_PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]),
                    "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// d += a b for a 16 x 16 (row-major fragment), b 16 x 8 (column-major fragment), d 16 x 8. Collective.
__device__ __forceinline__ void multiply_bfloat16(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  SELFATTN_PTX_SM80(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(d[0]),
      "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_float16(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  SELFATTN_PTX_SM80(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(d[0]),
      "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two 16-bit numbers, rounded to nearest even, `low` in the low half. NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t packed = 0;
  SELFATTN_PTX_SM80("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_float16(float low, float high) {
  uint32_t packed = 0;
  SELFATTN_PTX_SM80("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^value to about 2 units in the last place; subnormal arguments and results become zero.
__device__ __forceinline__ float exp2_approx(float value) {
  float result = 0.0f;
  SELFATTN_PTX_SM80("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Returns the same number, but hides its value from the compiler, which then computes values that depend on
// it in every iteration of a loop instead of keeping them in registers.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace selfattn::cuda::ptx

#undef SELFATTN_PTX_SM80
