// The functions of CUDA's runtime that csrc/cuda/common/tensor_map.cu calls. The compiler finds this file in
// place of CUDA's own.
#pragma once

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess = 0 };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,
};
constexpr unsigned long long cudaEnableDefault = 0;

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
const char* cudaGetErrorString(cudaError_t error);
