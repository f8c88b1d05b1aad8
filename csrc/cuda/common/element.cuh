// Elements of tensors in memory, and the type that kernels compute them in.
#pragma once

#include "../../core/attention_params.h"
#include "device.cuh"

namespace selfattn::cuda {

template <DType kDType>
struct Element;

template <>
struct Element<DType::kFloat64> {
  using Storage = double;
  using Accumulation = double;
  static __device__ __forceinline__ double widen(double x) { return x; }
  static __device__ __forceinline__ double narrow(double x) { return x; }
};

template <>
struct Element<DType::kFloat32> {
  using Storage = float;
  using Accumulation = float;
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x; }
};

template <>
struct Element<DType::kBFloat16> {
  using Storage = uint16_t;
  using Accumulation = float;
  static __device__ __forceinline__ float widen(uint16_t x) { return float_from_bfloat16(x); }
  static __device__ __forceinline__ uint16_t narrow(float x) { return bfloat16_from_float(x); }
};

template <>
struct Element<DType::kFloat16> {
  using Storage = uint16_t;
  using Accumulation = float;
  static __device__ __forceinline__ float widen(uint16_t x) { return float_from_float16(x); }
  static __device__ __forceinline__ uint16_t narrow(float x) { return float16_from_float(x); }
};

// One number per head, such as a slope or a sink.
template <class T>
__device__ __forceinline__ T head_scalar(const HeadScalars& scalars, int64_t batch, int64_t head) {
  return static_cast<const T*>(scalars.data)[batch * scalars.batch_stride + head * scalars.head_stride];
}

}  // namespace selfattn::cuda
