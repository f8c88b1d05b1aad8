// The instructions of csrc/cuda/common/ptx_sm80.cuh as functions. They have the same names and arguments, and
// that file says what they do.
#pragma once

#include <cstdint>

#include "copies.h"
#include "site.h"

namespace selfattn::emulator {

void copy_async(void* shared, const void* global, bool valid, const Site& site);
void copy_async_commit();
void copy_async_wait(int pending);
void load_matrices(uint32_t* registers, const void* row, bool transposed, const Site& site);

enum class MmaFormat { kBFloat16, kFloat16 };
void multiply(MmaFormat format, float* d, const uint32_t* a, const uint32_t* b, const Site& site);

}  // namespace selfattn::emulator

namespace selfattn::cuda::ptx {

using emulator::Site;

inline void copy_async_16(void* shared, const void* global, bool valid,
                          Site site = Site::at("copy_async_16")) {
  emulator::copy_async(shared, global, valid, site);
}

inline void copy_async_commit() { emulator::copy_async_commit(); }

template <int Pending>
void copy_async_wait() {
  emulator::copy_async_wait(Pending);
}

inline void load_matrix_x4(uint32_t (&r)[4], const void* row, Site site = Site::at("load_matrix_x4")) {
  emulator::load_matrices(r, row, false, site);
}

inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row,
                                      Site site = Site::at("load_matrix_x4_transposed")) {
  emulator::load_matrices(r, row, true, site);
}

inline void multiply_bfloat16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              Site site = Site::at("multiply_bfloat16")) {
  emulator::multiply(emulator::MmaFormat::kBFloat16, d, a, b, site);
}

inline void multiply_float16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             Site site = Site::at("multiply_float16")) {
  emulator::multiply(emulator::MmaFormat::kFloat16, d, a, b, site);
}

inline int opaque(int value) { return value; }
inline int unknown(int value) { return value; }

uint32_t pack_bfloat16(float low, float high);
uint32_t pack_float16(float low, float high);
float exp2_approx(float value);

}  // namespace selfattn::cuda::ptx
