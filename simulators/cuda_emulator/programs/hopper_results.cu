// Products of a warpgroup and copies of boxes, in every form, compared with a plain computation. It prints a
// line for each with the number of results that differ. Numbers are small integers, so that sums are exact in
// any order. tests/cuda/test_emulator_hopper.py runs it in the emulator; it also runs on a GPU (nvcc
// -std=c++17 -arch=sm_90a -Icsrc simulators/cuda_emulator/programs/hopper_results.cu
// csrc/cuda/common/tensor_map.cu).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/dtype.h"
#include "hopper/chain.cuh"
#include "hopper/matrices.cuh"

using namespace hopper;
using selfattn::cuda::launch;
using selfattn::cuda::TiledTensor;

namespace {

// How the left operand is given: in registers, or in shared memory with its rows or columns one after the
// other.
enum class Left { kRegisters, kByColumns, kByRows };

template <bool kBFloat16, int kColumns, Left kLeft, bool kRightTurned>
__global__ void multiply(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const uint16_t* a, float* d_rows) {
  constexpr int kARows = kLeft == Left::kByRows ? kDepth : kRows;
  constexpr int kAColumns = kLeft == Left::kByRows ? kRows : kDepth;
  constexpr int kBRows = kRightTurned ? kDepth : kColumns;
  constexpr int kBColumns = kRightTurned ? kColumns : kDepth;
  SELFATTN_DYNAMIC_SHARED(memory);
  unsigned char* const a_panels = aligned(memory);
  unsigned char* const b_panels = a_panels + panel_bytes(kARows, kAColumns);
  auto* const barrier = reinterpret_cast<uint64_t*>(b_panels + panel_bytes(kBRows, kBColumns));
  if (threadIdx.x == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::barrier_arrive_expecting(barrier, panel_bytes(kARows, kAColumns) + panel_bytes(kBRows, kBColumns));
    copy_panels(a_panels, a_map, barrier, kARows, kAColumns);
    copy_panels(b_panels, b_map, barrier, kBRows, kBColumns);
  }
  ptx::barrier_wait(barrier, 0);

  constexpr int kProducts = kDepth / kDepthOfProduct;
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
  uint32_t fragments[kProducts][4];
  for (int n = 0; n < kProducts; ++n) {
    for (int r = 0; r < 4; ++r) {
      const int row = first_row + lane / 4 + 8 * (r % 2);
      const int column = n * kDepthOfProduct + 2 * (lane % 4) + 8 * (r / 2);
      fragments[n][r] = a[row * kDepth + column] | uint32_t{a[row * kDepth + column + 1]} << 16;
    }
  }
  float d[kColumns / 8][4];
  ptx::products_fence();
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
    const int depth = n * kDepthOfProduct;
    const uint64_t b_matrix = kRightTurned ? ptx::matrix_by_rows(b_panels, kBRows, depth, 0)
                                           : ptx::matrix_by_columns(b_panels, kBRows, 0, depth);
    if constexpr (kLeft == Left::kRegisters) {
      ptx::product_async<kBFloat16, kColumns, kRightTurned>(d, fragments[n], b_matrix, n > 0);
    } else {
      const uint64_t a_matrix = kLeft == Left::kByRows ? ptx::matrix_by_rows(a_panels, kARows, depth, 0)
                                                       : ptx::matrix_by_columns(a_panels, kARows, 0, depth);
      ptx::product_async<kBFloat16, kColumns, kLeft == Left::kByRows, kRightTurned>(d, a_matrix, b_matrix,
                                                                                    n > 0);
    }
  }
  ptx::products_commit();
  ptx::products_wait<0>();
  ptx::products_touch(d);
  for (int tile = 0; tile < kColumns / 8; ++tile) {
    for (int r = 0; r < 4; ++r) {
      const int row = first_row + lane / 4 + 8 * (r / 2), column = 8 * tile + 2 * (lane % 4) + r % 2;
      d_rows[row * kColumns + column] = d[tile][r];
    }
  }
}

// One box, as it lies in shared memory.
__global__ void copy_one(const __grid_constant__ TensorMap map, int box_rows, int4 corner, uint32_t* out) {
  SELFATTN_DYNAMIC_SHARED(memory);
  unsigned char* const box = aligned(memory);
  const int bytes = box_rows * kRowBytes;
  auto* const barrier = reinterpret_cast<uint64_t*>(box + bytes);
  if (threadIdx.x == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::barrier_init_fence();
    ptx::copy_box_async(box, &map, barrier, corner.x, corner.y, corner.z, corner.w);
    ptx::barrier_arrive_expecting(barrier, bytes);
  }
  __syncthreads();
  ptx::barrier_wait(barrier, 0);
  for (int n = static_cast<int>(threadIdx.x); n < bytes / 4; n += kThreads)
    out[n] = reinterpret_cast<const uint32_t*>(box)[n];
}

// Memory that the host and kernels share.
template <class T>
struct Shared {
  explicit Shared(size_t count_) : count(count_) {
#if defined(SELFATTN_CUDA_EMULATOR)
    data = static_cast<T*>(std::aligned_alloc(512, (count * sizeof(T) + 511) / 512 * 512));
#else
    void* memory = nullptr;
    selfattn::cuda::check_cuda(cudaMallocManaged(&memory, count * sizeof(T)), "allocate");
    data = static_cast<T*>(memory);
#endif
    std::memset(data, 0, count * sizeof(T));
  }
  ~Shared() {
#if defined(SELFATTN_CUDA_EMULATOR)
    std::free(data);
#else
    cudaFree(data);
#endif
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator[](size_t n) { return data[n]; }

  T* data = nullptr;
  size_t count;
};

void wait_for_kernels() {
#if !defined(SELFATTN_CUDA_EMULATOR)
  selfattn::cuda::check_cuda(cudaDeviceSynchronize(), "run a kernel");
#endif
}

// Small integers that repeat late.
int number_at(int n) { return (n * 37 + n / 11 * 5) % 9 - 4; }

uint16_t bits_of(int number, bool bfloat16) {
  return bfloat16 ? selfattn::bfloat16_from_float(static_cast<float>(number))
                  : selfattn::float16_from_float(static_cast<float>(number));
}

TensorMap map_of(const uint16_t* data, int rows, int columns, int box_rows, bool bfloat16) {
  TiledTensor tensor;
  tensor.data = data;
  const int64_t sizes[4] = {columns, rows, 1, 1};
  const int64_t strides[4] = {1, columns, int64_t{rows} * columns, int64_t{rows} * columns};
  std::copy(sizes, sizes + 4, tensor.sizes);
  std::copy(strides, strides + 4, tensor.strides);
  tensor.box_rows = box_rows;
  tensor.bfloat16 = bfloat16;
  return selfattn::cuda::tensor_map(tensor);
}

template <bool kBFloat16, int kColumns, Left kLeft, bool kRightTurned>
void test_product() {
  Shared<uint16_t> a(kRows * kDepth), a_turned(kRows * kDepth), b(kColumns * kDepth);
  Shared<float> d(kRows * kColumns);
  const auto left = [](int row, int depth) { return number_at(row * kDepth + depth); };
  const auto right = [](int depth, int column) { return number_at(7 * column * kDepth + 3 * depth + 1); };
  for (int depth = 0; depth < kDepth; ++depth) {
    for (int row = 0; row < kRows; ++row) {
      a[static_cast<size_t>(row * kDepth + depth)] = bits_of(left(row, depth), kBFloat16);
      a_turned[static_cast<size_t>(depth * kRows + row)] = bits_of(left(row, depth), kBFloat16);
    }
    for (int column = 0; column < kColumns; ++column) {
      const int place = kRightTurned ? depth * kColumns + column : column * kDepth + depth;
      b[static_cast<size_t>(place)] = bits_of(right(depth, column), kBFloat16);
    }
  }
  const TensorMap a_map = kLeft == Left::kByRows ? map_of(a_turned.data, kDepth, kRows, kDepth, kBFloat16)
                                                 : map_of(a.data, kRows, kDepth, kRows, kBFloat16);
  const TensorMap b_map = kRightTurned ? map_of(b.data, kDepth, kColumns, kDepth, kBFloat16)
                                       : map_of(b.data, kColumns, kDepth, kColumns, kBFloat16);
  const int b_bytes = kRightTurned ? panel_bytes(kDepth, kColumns) : panel_bytes(kColumns, kDepth);
  const auto shared_bytes = static_cast<size_t>(kAlignment + panel_bytes(kRows, kDepth) + b_bytes + 8);
  launch(multiply<kBFloat16, kColumns, kLeft, kRightTurned>, dim3(1), dim3(kThreads), shared_bytes, nullptr,
         a_map, b_map, static_cast<const uint16_t*>(a.data), d.data);
  wait_for_kernels();
  int differ = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      int sum = 0;
      for (int depth = 0; depth < kDepth; ++depth) sum += left(row, depth) * right(depth, column);
      differ += d[static_cast<size_t>(row * kColumns + column)] == static_cast<float>(sum) ? 0 : 1;
    }
  }
  constexpr const char* kLefts[] = {"in registers", "by columns", "by rows"};
  std::printf("product of %d columns, %s, left %s, right %s: %d differ\n", kColumns,
              kBFloat16 ? "bfloat16" : "float16", kLefts[static_cast<int>(kLeft)],
              kRightTurned ? "by rows" : "by columns", differ);
}

template <bool kBFloat16, int kColumns>
void test_products() {
  test_product<kBFloat16, kColumns, Left::kRegisters, false>();
  test_product<kBFloat16, kColumns, Left::kRegisters, true>();
  test_product<kBFloat16, kColumns, Left::kByColumns, false>();
  test_product<kBFloat16, kColumns, Left::kByColumns, true>();
  test_product<kBFloat16, kColumns, Left::kByRows, false>();
  test_product<kBFloat16, kColumns, Left::kByRows, true>();
}

template <bool kBFloat16>
void test_all_products() {
  test_products<kBFloat16, 32>();
  test_products<kBFloat16, 64>();
  test_products<kBFloat16, 96>();
  test_products<kBFloat16, 128>();
  test_products<kBFloat16, 192>();
  test_products<kBFloat16, 256>();
}

// A tensor of 3 x 2 matrices of 40 rows of 72 elements, 80 apart.
void test_box(int column, int row, int second, int third, int box_rows) {
  constexpr int kSizes[4] = {72, 40, 2, 3}, kStrides[4] = {1, 80, 80 * 41, 80 * 41 * 2};
  Shared<uint16_t> tensor(static_cast<size_t>(kStrides[3] * kSizes[3]));
  for (size_t n = 0; n < tensor.count; ++n) tensor[n] = static_cast<uint16_t>(n % 30000 + 1);
  TiledTensor described;
  described.data = tensor.data;
  std::copy(kSizes, kSizes + 4, described.sizes);
  std::copy(kStrides, kStrides + 4, described.strides);
  described.box_rows = box_rows;
  Shared<uint32_t> out(static_cast<size_t>(box_rows * kRowBytes / 4));
  launch(copy_one, dim3(1), dim3(kThreads), static_cast<size_t>(kAlignment + box_rows * kRowBytes + 8),
         nullptr, selfattn::cuda::tensor_map(described), box_rows, int4{column, row, second, third},
         out.data);
  wait_for_kernels();
  int differ = 0;
  for (int y = 0; y < box_rows; ++y) {
    for (int x = 0; x < kPanelColumns; ++x) {
      const int at[4] = {column + x, row + y, second, third};
      bool inside = true;
      int place = 0;
      for (int n = 0; n < 4; ++n) {
        inside = inside && at[n] >= 0 && at[n] < kSizes[n];
        place += at[n] * kStrides[n];
      }
      const int expected = inside ? tensor[static_cast<size_t>(place)] : 0;
      // Chunks of eight elements change places.
      const int element = y * kPanelColumns + (x / 8 ^ y % 8) * 8 + x % 8;
      const uint32_t word = out[static_cast<size_t>(element / 2)];
      differ += static_cast<int>(word >> (16 * (element % 2)) & 0xffff) == expected ? 0 : 1;
    }
  }
  std::printf("box of %d rows at %d, %d, %d, %d: %d differ\n", box_rows, column, row, second, third, differ);
}

void test_chain() {
  constexpr int kKeys = kTiles * kRows, kQueries = 2 * kRows;
  Shared<uint16_t> q(kQueries * kRows), k(kKeys * kRows), v(kKeys * kRows);
  Shared<float> o(kQueries * kRows);
  const auto number = [](int n) { return number_at(n) / 3; };
  for (int n = 0; n < kQueries * kRows; ++n) q[static_cast<size_t>(n)] = bits_of(number(n), false);
  for (int n = 0; n < kKeys * kRows; ++n) {
    k[static_cast<size_t>(n)] = bits_of(number(5 * n + 3), false);
    v[static_cast<size_t>(n)] = bits_of(number(7 * n + 1), false);
  }
  const Chain chain{map_of(q.data, kQueries, kRows, kRows, false), map_of(k.data, kKeys, kRows, kRows, false),
                    map_of(v.data, kKeys, kRows, kRows, false), o.data};
  launch(multiply_chain, dim3(1), dim3(kGroups * kThreads), kChainBytes, nullptr, chain);
  wait_for_kernels();
  int differ = 0;
  for (int row = 0; row < kQueries; ++row) {
    int expected[kRows] = {};
    for (int key = 0; key < kKeys; ++key) {
      int score = 0;
      for (int n = 0; n < kRows; ++n) score += number(row * kRows + n) * number(5 * (key * kRows + n) + 3);
      for (int n = 0; n < kRows; ++n) expected[n] += score * number(7 * (key * kRows + n) + 1);
    }
    for (int n = 0; n < kRows; ++n)
      differ += o[static_cast<size_t>(row * kRows + n)] == static_cast<float>(expected[n]) ? 0 : 1;
  }
  std::printf("chain of products: %d differ\n", differ);
}

}  // namespace

int main() {
  try {
    test_box(0, 0, 0, 0, 8);
    test_box(0, 8, 1, 2, 32);
    test_box(64, 0, 1, 1, 40);   // eight columns of 64
    test_box(8, 30, 0, 2, 16);   // ten rows of 16
    test_box(-8, -3, 1, 0, 16);  // begins before the tensor
    test_box(0, 0, 2, 0, 8);     // beyond it
    test_box(0, 0, 0, 3, 8);
    test_box(72, 40, 1, 1, 256);
    test_chain();
    test_all_products<false>();
    test_all_products<true>();
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
