// Elements of tensors in memory, and the type that kernels compute them in.
#pragma once

#include "../../core/attention_params.h"
#include "device.cuh"

namespace selfattn::cuda {

// Numbers that are computed in the type in which they are stored.
template <class T>
struct WideElement {
  using Storage = T;
  using Accumulation = T;
  static __device__ __forceinline__ T widen(T x) { return x; }
  static __device__ __forceinline__ T narrow(T x) { return x; }
};

// Numbers of 16 bits, computed in float.
template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
struct HalfElement {
  using Storage = uint16_t;
  using Accumulation = float;
  static __device__ __forceinline__ float widen(uint16_t x) { return kWiden(x); }
  static __device__ __forceinline__ uint16_t narrow(float x) { return kNarrow(x); }
};

// Computes what float_from_float16() does, by one instruction instead of a dozen.
__device__ __forceinline__ float widened_float16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

template <DType kDType>
struct Element;
template <>
struct Element<DType::kFloat64> : WideElement<double> {};
template <>
struct Element<DType::kFloat32> : WideElement<float> {};
template <>
struct Element<DType::kBFloat16> : HalfElement<&float_from_bfloat16, &bfloat16_from_float> {};
template <>
struct Element<DType::kFloat16> : HalfElement<&widened_float16, &float16_from_float> {};

// One number per head, such as a slope or a sink.
template <class T>
__device__ __forceinline__ T head_scalar(const HeadScalars& scalars, int64_t batch, int64_t head) {
  return static_cast<const T*>(scalars.data)[batch * scalars.batch_stride + head * scalars.head_stride];
}

}  // namespace selfattn::cuda
