// Kernels with Hopper's instructions, compared with plain loops on the host. `hopper
// products|boxes|encode|generation` says how many numbers differ, or what the answers are.
#include "hopper_host.h"

namespace hopper {

namespace {

// ---- Products of a warpgroup ----

constexpr int kRows = 64, kDepth = 128, kPanel = 64;
enum class Left { kMemory, kTurned, kRegisters };

// Computes d (64 x columns) = a b + 1: a has kDepth columns, or rows if it is turned; b likewise.
template <bool kBFloat16, int kColumns, Left kLeft, bool kRightTurned>
__global__ void __launch_bounds__(128) multiply(const __grid_constant__ Maps maps, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t barrier;
  constexpr int kPanels = (kColumns + kPanel - 1) / kPanel;
  constexpr int kRightRows = kRightTurned ? kDepth : kColumns,
                kRightPanels = kRightTurned ? kPanels : kDepth / kPanel;
  constexpr int kLeftRows = kLeft == Left::kTurned ? kDepth : kRows,
                kLeftPanels = kLeft == Left::kTurned ? 1 : 2;
  unsigned char* const left = memory;
  unsigned char* const right = memory + kRows * kDepth * 2;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&barrier, 1);
    ptx::barrier_init_fence();
    ptx::barrier_arrive_expecting(&barrier, (kLeftPanels * kLeftRows + kRightPanels * kRightRows) * 128);
    for (int n = 0; n < kLeftPanels; ++n) {
      ptx::copy_box_async(left + n * kLeftRows * 128, &maps.left, &barrier, n * kPanel, 0, 0, 0);
    }
    for (int n = 0; n < kRightPanels; ++n) {
      ptx::copy_box_async(right + n * kRightRows * 128, &maps.right, &barrier, n * kPanel, 0, 0, 0);
    }
  }
  __syncthreads();
  ptx::barrier_wait(&barrier, 0);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t fragments[kDepth / 16][4];
  if constexpr (kLeft == Left::kRegisters) {
    for (int step = 0; step < kDepth / 16; ++step) {
      for (int n = 0; n < 4; ++n) {
        const int row = warp * 16 + lane / 4 + n % 2 * 8, column = step * 16 + lane % 4 * 2 + n / 2 * 8;
        const int chunk = column % 64 / 8 ^ row % 8;  // where the swizzle puts it
        fragments[step][n] = *reinterpret_cast<const uint32_t*>(left + column / 64 * kRows * 128 + row * 128 +
                                                                chunk * 16 + column % 8 * 2);
      }
    }
  }
  float d[kColumns / 8][4];
  for (int tile = 0; tile < kColumns / 8; ++tile) {
    for (int n = 0; n < 4; ++n) d[tile][n] = 7.0f;
  }
  ptx::products_touch(d);
  ptx::products_fence();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    const uint64_t b = kRightTurned ? ptx::matrix_by_rows(right, kRightRows, step * 16, 0)
                                    : ptx::matrix_by_columns(right, kRightRows, 0, step * 16);
    if constexpr (kLeft == Left::kRegisters) {
      ptx::product_async<kBFloat16, kColumns, kRightTurned>(d, fragments[step], b, step > 0);
    } else {
      const uint64_t a = kLeft == Left::kTurned ? ptx::matrix_by_rows(left, kLeftRows, step * 16, 0)
                                                : ptx::matrix_by_columns(left, kLeftRows, 0, step * 16);
      ptx::product_async<kBFloat16, kColumns, kLeft == Left::kTurned, kRightTurned>(d, a, b, step > 0);
    }
  }
  ptx::products_commit();
  ptx::products_wait<0>();
  ptx::products_touch(d);
  for (int tile = 0; tile < kColumns / 8; ++tile) {
    for (int n = 0; n < 4; ++n) {
      const int row = warp * 16 + lane / 4 + n / 2 * 8, column = tile * 8 + lane % 4 * 2 + n % 2;
      out[row * kColumns + column] = d[tile][n] + 1.0f;
    }
  }
}

template <bool kBFloat16, int kColumns, Left kLeft, bool kRightTurned>
void test_product() {
  constexpr bool kLeftTurned = kLeft == Left::kTurned;
  constexpr uint32_t kLeftSeed = 11, kRightSeed = 50021;
  const Tensor left =
      kLeftTurned ? matrix(kDepth, kRows, kBFloat16, kLeftSeed) : matrix(kRows, kDepth, kBFloat16, kLeftSeed);
  const Tensor right = kRightTurned ? matrix(kDepth, kColumns, kBFloat16, kRightSeed)
                                    : matrix(kColumns, kDepth, kBFloat16, kRightSeed);
  const Maps maps{map_of(left, kLeftTurned ? kDepth : kRows, kBFloat16),
                  map_of(right, kRightTurned ? kDepth : kColumns, kBFloat16)};
  float* const out = allocate<float>(kRows * kColumns);
  const auto kernel = multiply<kBFloat16, kColumns, kLeft, kRightTurned>;
  const int bytes = (kRows + (kColumns + 63) / 64 * 64) * kDepth * 2;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<1, 128, bytes>>>(maps, out);
  check(cudaGetLastError());
  const std::vector<float> found = to_host(out, kRows * kColumns);
  int wrong = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      int sum = 1;
      for (int k = 0; k < kDepth; ++k) {
        sum += number(kLeftTurned ? k * kRows + row : row * kDepth + k, kLeftSeed) *
               number(kRightTurned ? k * kColumns + column : column * kDepth + k, kRightSeed);
      }
      wrong += found[static_cast<size_t>(row * kColumns + column)] == static_cast<float>(sum) ? 0 : 1;
    }
  }
  std::printf("%s %d %d %d: %d\n", kBFloat16 ? "bfloat16" : "float16", kColumns, static_cast<int>(kLeft),
              kRightTurned ? 1 : 0, wrong);
}
template <bool kBFloat16, int kColumns>
void test_width() {
  test_product<kBFloat16, kColumns, Left::kMemory, false>();
  test_product<kBFloat16, kColumns, Left::kMemory, true>();
  test_product<kBFloat16, kColumns, Left::kTurned, false>();
  test_product<kBFloat16, kColumns, Left::kTurned, true>();
  test_product<kBFloat16, kColumns, Left::kRegisters, false>();
  test_product<kBFloat16, kColumns, Left::kRegisters, true>();
}
template <bool kBFloat16>
void test_widths() {
  test_width<kBFloat16, 32>();
  test_width<kBFloat16, 64>();
  test_width<kBFloat16, 96>();
  test_width<kBFloat16, 128>();
  test_width<kBFloat16, 192>();
  test_width<kBFloat16, 256>();
}
void products() {
  test_widths<false>();
  test_widths<true>();
}

// ---- Copies of boxes ----

constexpr int kBoxRows = 32, kBoxes = 8;
struct Place {
  int column, row, head, batch;
};
// The boxes are within the tensor of 80 x 50 x 3 x 2, across each of its edges, and beyond it.
constexpr Place kPlaces[kBoxes] = {{0, 0, 0, 0},  {16, 5, 2, 1}, {64, 40, 1, 0}, {-8, -3, 0, 1},
                                   {0, 50, 0, 0}, {80, 0, 0, 0}, {0, 0, 3, 0},   {-70, 0, 1, -1}};

// Elects one lane of each warp, the first.
__device__ bool is_elected() {
  uint32_t elected = 0;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}"
               : "=r"(elected));
#endif
  return elected != 0;
}
__device__ void prefetch_map(const TensorMap* map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

__global__ void copy_boxes(const __grid_constant__ TensorMap map, const Place* places, uint16_t* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t barrier;
  const bool brings = threadIdx.x < 32 && is_elected();
  if (brings) {
    prefetch_map(&map);
    ptx::barrier_init(&barrier, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  for (int n = 0; n < kBoxes; ++n) {
    if (brings) {
      ptx::barrier_arrive_expecting(&barrier, kBoxRows * 128);
      ptx::copy_box_async(memory, &map, &barrier, places[n].column, places[n].row, places[n].head,
                          places[n].batch);
    }
    ptx::barrier_wait(&barrier, static_cast<uint32_t>(n & 1));
    const auto* numbers = reinterpret_cast<const uint16_t*>(memory);
    for (int at = static_cast<int>(threadIdx.x); at < kBoxRows * 64; at += 64) {
      out[n * kBoxRows * 64 + at] = numbers[at];
    }
    __syncthreads();
  }
}

void boxes() {
  constexpr int64_t kSizes[4] = {80, 50, 3, 2}, kStrides[4] = {1, 88, 88 * 50 + 8, (88 * 50 + 8) * 3};
  const auto total = static_cast<size_t>(kStrides[3]) * 2;
  std::vector<uint16_t> values(total);
  for (size_t n = 0; n < total; ++n) values[n] = static_cast<uint16_t>(n * 40503u >> 3 | 1);
  Tensor tensor{to_device(values), {}, {}};
  std::memcpy(tensor.sizes, kSizes, sizeof kSizes);
  std::memcpy(tensor.strides, kStrides, sizeof kStrides);
  const TensorMap map = map_of(tensor, kBoxRows, true);
  Place* const places = to_device(std::vector<Place>(kPlaces, kPlaces + kBoxes));
  uint16_t* const out = allocate<uint16_t>(kBoxes * kBoxRows * 64);
  copy_boxes<<<1, 64, kBoxRows * 128>>>(map, places, out);
  check(cudaGetLastError());
  const std::vector<uint16_t> found = to_host(out, kBoxes * kBoxRows * 64);
  for (int n = 0; n < kBoxes; ++n) {
    int wrong = 0, zeros = 0;
    for (int row = 0; row < kBoxRows; ++row) {
      for (int column = 0; column < 64; ++column) {
        const Place& place = kPlaces[n];
        const int64_t at[4] = {place.column + column, place.row + row, place.head, place.batch};
        bool inside = true;
        int64_t offset = 0;
        for (int d = 0; d < 4; ++d) {
          inside = inside && at[d] >= 0 && at[d] < kSizes[d];
          offset += at[d] * kStrides[d];
        }
        const uint16_t expected = inside ? values[static_cast<size_t>(offset)] : 0;
        const int chunk = (column / 8) ^ (row % 8);
        wrong += found[static_cast<size_t>(((n * kBoxRows + row) * 64) + chunk * 8 + column % 8)] == expected
                     ? 0
                     : 1;
        zeros += inside ? 0 : 1;
      }
    }
    std::printf("box %d: %d (%d zeros)\n", n, wrong, zeros);
  }
}

// ---- The driver's answers about maps; the architecture that the text was compiled for ----

struct Question {
  const char* what;
  size_t map_offset, data_offset;
  cuuint32_t rank;
  cuuint64_t size, stride;
  cuuint32_t columns, rows;
};
constexpr Question kQuestions[] = {{"right", 0, 0, 4, 64, 128, 64, 64},
                                   {"map", 32, 0, 4, 64, 128, 64, 64},
                                   {"address", 0, 8, 4, 64, 128, 64, 64},
                                   {"rank", 0, 0, 6, 64, 128, 64, 64},
                                   {"size", 0, 0, 4, 0, 128, 64, 64},
                                   {"stride", 0, 0, 4, 64, 136, 64, 64},
                                   {"long stride", 0, 0, 4, 64, 1ull << 40, 64, 64},
                                   {"rows", 0, 0, 4, 64, 128, 64, 257},
                                   {"swizzle", 0, 0, 4, 64, 128, 128, 64},
                                   {"columns", 0, 0, 4, 64, 128, 60, 64}};

void encode() {
  auto* const data = reinterpret_cast<unsigned char*>(allocate<uint16_t>(64 * 64));
  for (const Question& question : kQuestions) {
    alignas(64) unsigned char maps[2 * sizeof(CUtensorMap)];
    const cuuint64_t sizes[6] = {64, question.size, 1, 1, 1, 1};
    const cuuint64_t strides[5] = {question.stride, 8192, 8192, 8192, 8192};
    const cuuint32_t box[6] = {question.columns, question.rows, 1, 1, 1, 1}, ones[6] = {1, 1, 1, 1, 1, 1};
    const CUresult result = driver_encode()(
        reinterpret_cast<CUtensorMap*>(maps + question.map_offset), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        question.rank, data + question.data_offset, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    std::printf("%s: %d\n", question.what, static_cast<int>(result));
  }
}

__global__ void write_generation(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  *out = 9000 + __CUDA_ARCH__;
#elif defined(__CUDA_ARCH__)
  *out = __CUDA_ARCH__;
#endif
}
void generation() {
  int* const out = allocate<int>(1);
  write_generation<<<1, 1>>>(out);
  check(cudaGetLastError());
  std::printf("%d\n", to_host(out, 1)[0]);
}

struct Named {
  const char* name;
  void (*test)();
};
constexpr Named kTests[] = {
    {"products", products}, {"boxes", boxes}, {"encode", encode}, {"generation", generation}};

}  // namespace

}  // namespace hopper

int main(int count, char** words) {
  for (const hopper::Named& named : hopper::kTests) {
    if (count < 2 || std::strcmp(words[1], named.name) != 0) continue;
    named.test();
    return 0;
  }
  std::fprintf(stderr, "which test?\n");
  return 2;
}
