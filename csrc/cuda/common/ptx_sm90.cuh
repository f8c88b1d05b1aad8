// The instructions of sm_90a that CUDA C++ has no words for.
//
// They are barriers of asynchronous copies, copies by tensor maps (TMA), products of a warpgroup (wgmma),
// barriers of some warps, and the exchange of registers between warps. This is the only file with inline PTX
// for them. On other devices they trap; kernels that use them are never chosen there.
//
// Terms of the PTX manual: a "warpgroup" is four neighbouring warps, the first of which has a number that is
// a multiple of four. "Collective" calls are made by all its 128 threads together. The "asynchronous proxy"
// is how copies and products access shared memory, apart from the loads and stores of threads.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "tensor_map.h"

namespace selfattn::cuda::ptx {

// Whether this is code for the only devices that have these instructions. Otherwise kernels are empty.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kForHopper = false;
#else
constexpr bool kForHopper = true;
#endif

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SELFATTN_PTX_SM90(...) __trap()
#else
#define SELFATTN_PTX_SM90(...) asm volatile(__VA_ARGS__)
#endif

// An address in shared memory in the form that instructions take.
__device__ __forceinline__ uint32_t shared_address_of(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers of asynchronous copies (mbarrier), 8 bytes of shared memory each ----
//
// A barrier is in phase 0, 1, 2, ... A phase ends when `arrivals` threads have arrived and as many bytes have
// come as they announced. After the wait, the copies are visible, and so is everything that the threads did
// before they arrived.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  SELFATTN_PTX_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address_of(barrier)),
                    "r"(arrivals) : "memory");
}

// Makes barriers that this thread has initialised visible to the asynchronous proxy. Other threads see them
// after a __syncthreads() that follows.
__device__ __forceinline__ void barrier_init_fence() {
  SELFATTN_PTX_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  SELFATTN_PTX_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address_of(barrier)) : "memory");
}

// Announces that copies will bring `bytes` to the current phase, and arrives.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  SELFATTN_PTX_SM90(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address_of(barrier)),
      "r"(bytes) : "memory");
}

// Waits for the end of the phase whose number has this parity: the current phase or the one before. The loop
// is in PTX because ptxas assumes that lanes leave a C++ loop at different times, and then keeps values that
// all lanes share in registers of each lane.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  SELFATTN_PTX_SM90(
      "{\n"
      ".reg .pred ended;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
      "@ended bra done%=;\n"
      "bra again%=;\n"
      "done%=:\n"
      "}" ::"r"(shared_address_of(barrier)),
      "r"(parity) : "memory");
}

// ---- Copies by tensor maps ----

// Starts to copy the box of a tensor that begins at these coordinates, innermost first, to shared memory at a
// multiple of 1024 bytes, 128 bytes for each row of the box. Elements beyond the tensor are zeros, and the
// barrier counts them as if they were read. One thread calls it.
__device__ __forceinline__ void copy_box_async(void* shared, const TensorMap* map, uint64_t* barrier,
                                               int column, int row, int second, int third) {
  SELFATTN_PTX_SM90(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], [%2];" ::"r"(shared_address_of(shared)),
      "l"(map), "r"(shared_address_of(barrier)), "r"(column), "r"(row), "r"(second), "r"(third) : "memory");
}

// Orders this thread's earlier stores to shared memory before accesses of the asynchronous proxy that threads
// start after they have waited for this one.
__device__ __forceinline__ void fence_async_proxy() {
  SELFATTN_PTX_SM90("fence.proxy.async.shared::cta;" :: : "memory");
}

// ---- Barriers of some warps ----

// Waits at barrier `number`, 1 to 15, of a block until `threads` threads, whole warps, have come to it.
// Barrier 0 is that of __syncthreads().
__device__ __forceinline__ void sync_threads(int number, int threads) {
  SELFATTN_PTX_SM90("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at the barrier without waiting, so that the others need not wait for this warp any more.
__device__ __forceinline__ void arrive_threads(int number, int threads) {
  SELFATTN_PTX_SM90("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Registers ----

// Lets the warpgroup keep so many registers per thread, a multiple of 8 from 24 to 256, and frees the others.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  SELFATTN_PTX_SM90("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Makes the warpgroup wait until it has so many registers per thread, from those that others have given up.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  SELFATTN_PTX_SM90("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Products of a warpgroup ----

// The descriptor of a matrix `bytes` behind `panels`. Its high half is a constant, and the low half is added
// up in 32 bits, because with 64 ptxas propagates a carry into the high half of every descriptor. The
// address, bits 0 to 13, cannot carry into the stride from bit 16 on, because shared memory ends before 2^18
// bytes.
__device__ __forceinline__ uint64_t matrix_at(const void* panels, int bytes, int stride) {
  constexpr uint32_t kSwizzle128 = uint32_t{1} << 30;
  constexpr uint32_t kEightRows = 1024 >> 4;  // from eight rows to the next
  const uint32_t first = static_cast<uint32_t>(stride >> 4) << 16 | shared_address_of(panels) >> 4;
  const uint32_t low = first + static_cast<uint32_t>(bytes >> 4);
  return uint64_t{kSwizzle128 | kEightRows} << 32 | low;
}

// Descriptors tell a product how a matrix of 16-bit elements lies in shared memory. The matrix is cut into
// panels of 64 columns, 128 bytes, of so many rows. Each panel begins at a multiple of 1024 bytes, and its
// chunks of 16 bytes are permuted as copy_box_async() does it. `row` and `column` are where the product
// begins.
//
// This one is for an operand that is summed along its columns, 16 of them for each product. The row is a
// multiple of 8, the column of 16.
__device__ __forceinline__ uint64_t matrix_by_columns(const void* panels, int panel_rows, int row,
                                                      int column) {
  constexpr int kNoStride = 16;  // unused, and 1 as a descriptor has it: the product has columns of one panel
  return matrix_at(panels, column / 64 * panel_rows * 128 + row * 128 + column % 64 * 2, kNoStride);
}

// This one is for an operand that is summed along its rows ("turned"), 16 of them for each product. The row
// is a multiple of 8, the column of 64.
__device__ __forceinline__ uint64_t matrix_by_rows(const void* panels, int panel_rows, int row, int column) {
  const int panel = panel_rows * 128;  // bytes from one to the next
  return matrix_at(panels, column / 64 * panel + row * 128, panel);
}

// Must precede the first product of a group, and any product whose registers something other than products
// has touched since the last one. Collective, like all functions below.
__device__ __forceinline__ void products_fence() {
  SELFATTN_PTX_SM90("wgmma.fence.sync.aligned;" :: : "memory");
}

// Closes a group of products. The group may be empty.
__device__ __forceinline__ void products_commit() {
  SELFATTN_PTX_SM90("wgmma.commit_group.sync.aligned;" :: : "memory");
}

// Waits until all groups except the newest `Pending` are finished. Until then neither results nor operands of
// a product may be touched, those in shared memory included.
template <int Pending>
__device__ __forceinline__ void products_wait() {
  SELFATTN_PTX_SM90("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Tells the compiler that products may have changed these registers. It makes no instruction.
template <int kTiles>
__device__ __forceinline__ void products_touch(float (&d)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[tile][i])::"memory");
  }
}

// Does the same for a left operand, which must be in its registers before products_fence().
__device__ __forceinline__ void products_touch(uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// The text and the operands of a product's instruction. Results come first, in registers %0 and so on, four
// for each eight columns.
#define SELFATTN_RESULTS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SELFATTN_RESULTS_32 \
  SELFATTN_RESULTS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SELFATTN_RESULTS_48 \
  SELFATTN_RESULTS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SELFATTN_RESULTS_64 \
  SELFATTN_RESULTS_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SELFATTN_RESULTS_96                                                                \
  SELFATTN_RESULTS_64                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80," \
  " %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SELFATTN_RESULTS_128                                                                \
  SELFATTN_RESULTS_96                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110," \
  " %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124,"    \
  " %125, %126, %127"
#define SELFATTN_TILE(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SELFATTN_FOUR_TILES(n) \
  SELFATTN_TILE(n), SELFATTN_TILE(n + 1), SELFATTN_TILE(n + 2), SELFATTN_TILE(n + 3)
#define SELFATTN_OPERANDS_16 SELFATTN_FOUR_TILES(0)
#define SELFATTN_OPERANDS_32 SELFATTN_OPERANDS_16, SELFATTN_FOUR_TILES(4)
#define SELFATTN_OPERANDS_48 SELFATTN_OPERANDS_32, SELFATTN_FOUR_TILES(8)
#define SELFATTN_OPERANDS_64 SELFATTN_OPERANDS_48, SELFATTN_FOUR_TILES(12)
#define SELFATTN_OPERANDS_96 SELFATTN_OPERANDS_64, SELFATTN_FOUR_TILES(16), SELFATTN_FOUR_TILES(20)
#define SELFATTN_OPERANDS_128 SELFATTN_OPERANDS_96, SELFATTN_FOUR_TILES(24), SELFATTN_FOUR_TILES(28)

// One macro is for two operands in shared memory, the other for a left operand in registers. The numbers are
// those of the operands behind the results. (No parameter of the macros may have the name of a parameter of
// product_async(), because the text uses those names.)
#define SELFATTN_MEMORY_PRODUCT(columns, results, type, a, b, scale, left, right)                           \
  SELFATTN_PTX_SM90("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #scale                                       \
                    ", 0;\n"                                                                                \
                    "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                   \
                    " {" SELFATTN_RESULTS_##results "}, %" #a ", %" #b ", adds, 1, 1, %" #left ", %" #right \
                                                    ";\n}" : SELFATTN_OPERANDS_##results : "l"(a_matrix),   \
                    "l"(b_matrix), "r"(adds ? 1 : 0), "n"(kLeftTurned ? 1 : 0),                             \
                    "n"(kRightTurned ? 1 : 0) : "memory")
#define SELFATTN_REGISTER_PRODUCT(columns, results, type, a0, a1, a2, a3, b, scale, right)              \
  SELFATTN_PTX_SM90("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #scale                                   \
                    ", 0;\n"                                                                            \
                    "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type               \
                    " {" SELFATTN_RESULTS_##results "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b \
                                                    ", adds, 1, 1, %" #right                            \
                                                    ";\n}" : SELFATTN_OPERANDS_##results : "r"(a[0]),   \
                    "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix), "r"(adds ? 1 : 0),                  \
                    "n"(kRightTurned ? 1 : 0) : "memory")

// One of these with the numbers of its operands, for the element type of product_async().
#define SELFATTN_OF_TYPE(product, columns, results, ...) \
  if constexpr (kBFloat16) {                             \
    product(columns, results, "bf16", __VA_ARGS__);      \
  } else {                                               \
    product(columns, results, "f16", __VA_ARGS__);       \
  }

template <int kColumns>
constexpr bool kProductColumns = kColumns == 32 || kColumns == 64 || kColumns == 96 || kColumns == 128 ||
                                 kColumns == 192 || kColumns == 256;

// d = a b, or d += a b where `adds`: a is 64 x 16, b is 16 x kColumns; 16-bit elements, float sums. Warp w of
// the group has the rows 16 w to 16 w + 15 of d, whose tile n of eight columns lies in its lanes like a
// result of ptx_sm80.cuh. `a` is a matrix in shared memory, or the fragment of the warp's 16 rows in the
// layout of ptx_sm80.cuh. matrix_by_rows() describes a matrix that is turned, matrix_by_columns() any other.
template <bool kBFloat16, int kColumns, bool kLeftTurned, bool kRightTurned>
__device__ __forceinline__ void product_async(float (&d)[kColumns / 8][4], uint64_t a_matrix,
                                              uint64_t b_matrix, bool adds) {
  static_assert(kProductColumns<kColumns>, "there is no text for this one");
  if constexpr (kColumns == 32) {
    SELFATTN_OF_TYPE(SELFATTN_MEMORY_PRODUCT, 32, 16, 16, 17, 18, 19, 20);
  } else if constexpr (kColumns == 64) {
    SELFATTN_OF_TYPE(SELFATTN_MEMORY_PRODUCT, 64, 32, 32, 33, 34, 35, 36);
  } else if constexpr (kColumns == 96) {
    SELFATTN_OF_TYPE(SELFATTN_MEMORY_PRODUCT, 96, 48, 48, 49, 50, 51, 52);
  } else if constexpr (kColumns == 128) {
    SELFATTN_OF_TYPE(SELFATTN_MEMORY_PRODUCT, 128, 64, 64, 65, 66, 67, 68);
  } else if constexpr (kColumns == 192) {
    SELFATTN_OF_TYPE(SELFATTN_MEMORY_PRODUCT, 192, 96, 96, 97, 98, 99, 100);
  } else if constexpr (kColumns == 256) {
    SELFATTN_OF_TYPE(SELFATTN_MEMORY_PRODUCT, 256, 128, 128, 129, 130, 131, 132);
  }
}
template <bool kBFloat16, int kColumns, bool kRightTurned>
__device__ __forceinline__ void product_async(float (&d)[kColumns / 8][4], const uint32_t (&a)[4],
                                              uint64_t b_matrix, bool adds) {
  static_assert(kProductColumns<kColumns>, "there is no text for this one");
  if constexpr (kColumns == 32) {
    SELFATTN_OF_TYPE(SELFATTN_REGISTER_PRODUCT, 32, 16, 16, 17, 18, 19, 20, 21, 22);
  } else if constexpr (kColumns == 64) {
    SELFATTN_OF_TYPE(SELFATTN_REGISTER_PRODUCT, 64, 32, 32, 33, 34, 35, 36, 37, 38);
  } else if constexpr (kColumns == 96) {
    SELFATTN_OF_TYPE(SELFATTN_REGISTER_PRODUCT, 96, 48, 48, 49, 50, 51, 52, 53, 54);
  } else if constexpr (kColumns == 128) {
    SELFATTN_OF_TYPE(SELFATTN_REGISTER_PRODUCT, 128, 64, 64, 65, 66, 67, 68, 69, 70);
  } else if constexpr (kColumns == 192) {
    SELFATTN_OF_TYPE(SELFATTN_REGISTER_PRODUCT, 192, 96, 96, 97, 98, 99, 100, 101, 102);
  } else if constexpr (kColumns == 256) {
    SELFATTN_OF_TYPE(SELFATTN_REGISTER_PRODUCT, 256, 128, 128, 129, 130, 131, 132, 133, 134);
  }
}

}  // namespace selfattn::cuda::ptx

#undef SELFATTN_RESULTS_16
#undef SELFATTN_RESULTS_32
#undef SELFATTN_RESULTS_48
#undef SELFATTN_RESULTS_64
#undef SELFATTN_RESULTS_96
#undef SELFATTN_RESULTS_128
#undef SELFATTN_TILE
#undef SELFATTN_FOUR_TILES
#undef SELFATTN_OPERANDS_16
#undef SELFATTN_OPERANDS_32
#undef SELFATTN_OPERANDS_48
#undef SELFATTN_OPERANDS_64
#undef SELFATTN_OPERANDS_96
#undef SELFATTN_OPERANDS_128
#undef SELFATTN_MEMORY_PRODUCT
#undef SELFATTN_REGISTER_PRODUCT
#undef SELFATTN_OF_TYPE
#undef SELFATTN_PTX_SM90
