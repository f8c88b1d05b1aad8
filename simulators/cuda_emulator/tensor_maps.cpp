// The functions of CUDA's runtime and driver that csrc/cuda/common/tensor_map.cu calls.
#include "tensor_maps.h"

#include <cstring>

#include "cuda.h"
#include "cuda_runtime.h"

namespace selfattn::emulator {

namespace {

constexpr uint64_t kMark = 0x746e736f72206d61;
constexpr uint32_t kMostDimensions = 5;
constexpr uint64_t kMostElements = uint64_t{1} << 32;
constexpr uint64_t kStrideEnd = uint64_t{1} << 40;
constexpr uint32_t kMostOfBox = 256;
constexpr uint64_t kAlignment = 16;
constexpr uint64_t kSpanOfSwizzle = 128;
constexpr uintptr_t kAlignmentOfMap = 64;
constexpr uint64_t kElementBytes = 2;

static_assert(sizeof(TiledMap) <= sizeof(CUtensorMap), "a map has 128 bytes");

// Encodes a map as the driver's manual says, for the data types that kernels here use.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  bool fits = reinterpret_cast<uintptr_t>(map) % kAlignmentOfMap == 0;
  fits &= type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  fits &= rank >= 3 && rank <= kMostDimensions && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
  fits &= reinterpret_cast<uintptr_t>(address) % kAlignment == 0 && address != nullptr;
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  TiledMap made{};
  for (cuuint32_t n = 0; n < rank; ++n) {
    fits &=
        sizes[n] >= 1 && sizes[n] <= kMostElements && box[n] >= 1 && box[n] <= kMostOfBox && steps[n] == 1;
    made.sizes[n] = sizes[n];
    made.box[n] = static_cast<uint16_t>(box[n]);
    if (n + 1 == rank) break;
    fits &= strides[n] % kAlignment == 0 && strides[n] < kStrideEnd;
    made.strides[n] = strides[n];
  }
  const uint64_t inner = box[0] * kElementBytes;
  fits &= inner % kAlignment == 0;
  made.swizzles = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (made.swizzles) fits &= inner <= kSpanOfSwizzle;
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  made.mark = kMark;
  made.address = address;
  made.rank = static_cast<uint8_t>(rank);
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

}  // namespace

bool read_tiled_map(const void* bytes, TiledMap& map) {
  std::memcpy(&map, bytes, sizeof(map));
  return map.mark == kMark;
}

}  // namespace selfattn::emulator

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int version,
                                             unsigned long long, cudaDriverEntryPointQueryResult* found) {
  constexpr unsigned int kFirstVersion = 12000;
  const bool is_known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = nullptr;
  *found = !is_known                 ? cudaDriverEntryPointSymbolNotFound
           : version < kFirstVersion ? cudaDriverEntryPointVersionNotSufficent
                                     : cudaDriverEntryPointSuccess;
  if (*found == cudaDriverEntryPointSuccess)
    *function = reinterpret_cast<void*>(&selfattn::emulator::encode_tiled);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "an error"; }
