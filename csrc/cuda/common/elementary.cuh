// Arithmetic as overloads for float and double, in full precision with any compiler flags.
#pragma once

#include "device.cuh"

namespace selfattn::cuda {

template <class T>
__host__ __device__ constexpr T infinity() {
  return static_cast<T>(__builtin_huge_val());
}

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

// The larger number; the result is NaN only if both are.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// A product that is rounded before anything is added to it: no compiler merges it with an addition. Scores
// need that, so that every pass gets the same bits, and the largest score minus the row's maximum is exactly
// 0.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

}  // namespace selfattn::cuda
