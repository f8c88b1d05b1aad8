// Functions of CUDA's driver that programs ask the runtime for.
#include <cuda.h>

#include <cstdio>
#include <cstring>

#include "options.h"
#include "runtime/runtime.h"
#include "tensor_map.h"

namespace ptx_machine {

namespace {

static_assert(sizeof(CUtensorMap) == TensorMap::kBytes);

constexpr u64 kAlignment = 16, kMostStride = 1ull << 40, kMostSize = 1ull << 32;
constexpr u32 kMostBox = 256, kSwizzleBytes = 128;

u32 bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

// Returns what the driver would refuse, or what this machine does not support; null if all is right.
const char* encode(TensorMap* map, CUtensorMapDataType type, u32 rank, void* address, const cuuint64_t* sizes,
                   const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                   CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                   CUtensorMapFloatOOBfill fill) {
  const u32 element = bytes_of(type);
  if (element == 0) return "a type of elements that is not known";
  if (rank == 0 || rank > TensorMap::kMostDimensions) return "a rank that is not 1 to 5";
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return "interleaved tensors, which are not known here";
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_128B) {
    return "a swizzle that is not known here";
  }
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) return "NaN beyond the tensor, which is not known here";
  map->address = reinterpret_cast<u64>(address);
  if (map->address == 0 || map->address % kAlignment != 0) return "an address that is no multiple of 16";
  map->mark = TensorMap::kMark;
  map->dimensions = static_cast<u8>(rank);
  map->swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  map->strides[0] = element;
  for (u32 n = 0; n < rank; ++n) {
    if (sizes[n] == 0 || sizes[n] > kMostSize) return "a size that is not 1 to 2^32";
    if (box[n] == 0 || box[n] > kMostBox) return "a box of a size that is not 1 to 256";
    if (element_strides[n] != 1) return "strides of elements that are not 1, which are not known here";
    map->most_coordinates[n] = static_cast<u32>(sizes[n] - 1);
    map->box[n] = static_cast<u16>(box[n]);
    if (n == 0) continue;
    if (strides[n - 1] % kAlignment != 0) return "a stride that is no multiple of 16 bytes";
    if (strides[n - 1] >= kMostStride) return "a stride of 2^40 bytes or more";
    map->strides[n] = strides[n - 1];
  }
  if (map->row_bytes() % kAlignment != 0) return "a box whose rows are no multiple of 16 bytes";
  if (map->swizzled && map->row_bytes() > kSwizzleBytes)
    return "a box whose rows are longer than the swizzle";
  map->sum = map->sum_of_bytes();
  return nullptr;
}

CUresult encode_tiled(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (options().capability < 90) return CUDA_ERROR_NOT_SUPPORTED;
  TensorMap map;
  const char* problem = reinterpret_cast<u64>(result) % TensorMap::kAlignment != 0
                            ? "a map that does not begin at a multiple of 64 bytes"
                            : encode(&map, type, rank, address, sizes, strides, box, element_strides,
                                     interleave, swizzle, fill);
  if (problem != nullptr) {
    std::fprintf(stderr, "ptx machine: cuTensorMapEncodeTiled with %s\n", problem);
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(static_cast<void*>(result), 0, sizeof(*result));
  std::memcpy(static_cast<void*>(result), &map, sizeof map);
  return CUDA_SUCCESS;
}

// torch looks for functions of the driver that it then does not call.
int refuse_driver_call() { return cudaErrorNotSupported; }

cudaError_t find(const char* symbol, void** function, cudaDriverEntryPointQueryResult* status) {
  if (options().verbose > 1) std::fprintf(stderr, "ptx machine: the driver's %s\n", symbol);
  *function = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0
                  ? reinterpret_cast<void*>(&encode_tiled)
                  : reinterpret_cast<void*>(&refuse_driver_call);
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // namespace

}  // namespace ptx_machine

using namespace ptx_machine;

PTX_MACHINE_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                                unsigned long long,
                                                                cudaDriverEntryPointQueryResult* status) {
  return find(symbol, function, status);
}
PTX_MACHINE_EXPORT cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function,
                                                       unsigned long long,
                                                       cudaDriverEntryPointQueryResult* status) {
  return find(symbol, function, status);
}
