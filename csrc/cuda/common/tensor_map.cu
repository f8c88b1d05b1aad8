// Makes tensor maps with a function of CUDA's driver, which is found at run time.
#include "tensor_map.h"

#include <cuda.h>  // for its types: the library is not linked to the driver, which builds may lack
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace selfattn::cuda {

namespace {

constexpr int kDimensions = 4;
constexpr int kElementBytes = 2;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// Finds the driver's function in its version of CUDA 12.0.
EncodeTiled find_encode_tiled() {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA failed to find a function of its driver, ") + kName + ": " +
                             cudaGetErrorString(status));
  }
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("CUDA's driver has no ") + kName + ": it is older than CUDA 12.0");
  }
  return reinterpret_cast<EncodeTiled>(function);
}

std::string text_of(const int64_t (&numbers)[kDimensions]) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

}  // namespace

TensorMap tensor_map(const TiledTensor& tensor) {
  // If this throws, the next call looks again.
  static const EncodeTiled encode_tiled = find_encode_tiled();

  cuuint64_t sizes[kDimensions], strides[kDimensions - 1];  // strides in bytes; the first dimension has none
  for (int n = 0; n < kDimensions; ++n) {
    sizes[n] = static_cast<cuuint64_t>(tensor.sizes[n]);
    if (n > 0) strides[n - 1] = static_cast<cuuint64_t>(tensor.strides[n]) * kElementBytes;
  }
  const cuuint32_t box[kDimensions] = {TiledTensor::kBoxColumns, static_cast<cuuint32_t>(tensor.box_rows), 1,
                                       1};
  const cuuint32_t steps[kDimensions] = {1, 1, 1, 1};
  CUtensorMap made;
  const CUresult result = encode_tiled(
      &made, tensor.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      kDimensions, const_cast<void*>(tensor.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("CUDA's driver cannot make a map of a tensor with the sizes " +
                             text_of(tensor.sizes) + " and the strides " + text_of(tensor.strides) +
                             " for boxes of " + std::to_string(tensor.box_rows) + " rows: error " +
                             std::to_string(static_cast<int>(result)));
  }
  TensorMap map;
  static_assert(sizeof(map) == sizeof(made), "both are what the hardware reads");
  std::memcpy(&map, &made, sizeof(map));
  return map;
}

}  // namespace selfattn::cuda
