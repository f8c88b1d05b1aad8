#include "ptx_sm80_model.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/dtype.h"
#include "banks.h"
#include "options.h"
#include "races.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "tensor_core.h"

namespace selfattn::emulator {

namespace {

constexpr int kRowBytes = 16;
constexpr int kMatrixRows = 8;
constexpr int kMatrices = 4;

struct MatrixLoad {
  uint32_t* registers;
  const void* row;
  bool transposed;
  const Site* site;
};

uint16_t element(const void* row, int column) {
  uint16_t value;
  std::memcpy(&value, static_cast<const unsigned char*>(row) + 2 * column, sizeof(value));
  return value;
}

void load(const Operands& operands) {
  const auto& first_lane = *static_cast<const MatrixLoad*>(operands[0]);
  std::vector<const void*> rows(kMatrixRows);
  for (int m = 0; m < kMatrices && options().banks; ++m) {
    for (int r = 0; r < kMatrixRows; ++r) {
      const auto lane = static_cast<size_t>(m * kMatrixRows + r);
      rows[static_cast<size_t>(r)] = static_cast<const MatrixLoad*>(operands[lane])->row;
    }
    banks::record(*first_lane.site, rows);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto* mine = static_cast<const MatrixLoad*>(operands[static_cast<size_t>(lane)]);
    for (int m = 0; m < kMatrices; ++m) {
      const auto row = [&](int r) {
        return static_cast<const MatrixLoad*>(operands[static_cast<size_t>(m * kMatrixRows + r)])->row;
      };
      const int first = 2 * (lane % 4), other = lane / 4;
      const uint32_t low = mine->transposed ? element(row(first), other) : element(row(other), first);
      const uint32_t high =
          mine->transposed ? element(row(first + 1), other) : element(row(other), first + 1);
      mine->registers[m] = low | high << 16;
    }
  }
}

struct Product {
  MmaFormat format;
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

float half_of(uint32_t packed, int half, MmaFormat format) {
  const auto bits = static_cast<uint16_t>(packed >> (16 * half));
  return format == MmaFormat::kBFloat16 ? float_from_bfloat16(bits) : float_from_float16(bits);
}

// Gathers the fragments of the lanes into matrices, as the PTX manual draws them. `group` is the number of
// the lane's group of four lanes, which is its row, and `place` is the lane's number in that group.
void gather(const Product& lane, int group, int place, MmaOperands& matrices) {
  for (int r = 0; r < 4; ++r) {
    const int row = group + 8 * (r % 2);
    const int column = 2 * place + 8 * (r / 2);
    for (int half = 0; half < 2; ++half)
      matrices.a[row][column + half] = half_of(lane.a[r], half, lane.format);
  }
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * place + 8 * r;
    for (int half = 0; half < 2; ++half)
      matrices.b[row + half][group] = half_of(lane.b[r], half, lane.format);
  }
}

void multiply_warp(const Operands& operands) {
  MmaOperands matrices;
  const MmaFormat format = static_cast<const Product*>(operands[0])->format;
  matrices.smallest_exponent =
      format == MmaFormat::kFloat16 ? kSmallestExponentFloat16 : kSmallestExponentFloat32;
  // The accumulator lies in the same place in both formats.
  const auto accumulator = [&](int lane, int r) -> float& {
    return matrices.d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
  };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& mine = *static_cast<const Product*>(operands[static_cast<size_t>(lane)]);
    gather(mine, lane / 4, lane % 4, matrices);
    for (int r = 0; r < 4; ++r) accumulator(lane, r) = mine.d[r];
  }
  multiply_accumulate(matrices, options().capability);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& mine = *static_cast<const Product*>(operands[static_cast<size_t>(lane)]);
    for (int r = 0; r < 4; ++r) mine.d[r] = accumulator(lane, r);
  }
}

}  // namespace

void copy_async(void* shared, const void* global, bool valid, const Site& site) {
  if (valid && reinterpret_cast<uintptr_t>(global) % kRowBytes != 0) {
    fail(whereabouts() + " gives " + to_string(site) + " a global address that is not aligned to 16 bytes");
  }
  self().copies.issue(shared, valid ? global : nullptr, kRowBytes, site);
}

void copy_async_commit() { self().copies.commit(); }

void copy_async_wait(int pending) { self().copies.wait(pending); }

void load_matrices(uint32_t* registers, const void* row, bool transposed, const Site& site) {
  check_shared(row, kRowBytes, site);
  races::read(row, kRowBytes, site);
  MatrixLoad operands{registers, row, transposed, &site};
  meet(site, kFullMask, &operands, &load);
}

void multiply(MmaFormat format, float* d, const uint32_t* a, const uint32_t* b, const Site& site) {
  Product operands{format, d, a, b};
  meet(site, kFullMask, &operands, &multiply_warp);
}

}  // namespace selfattn::emulator

namespace selfattn::cuda::ptx {

namespace {

constexpr uint32_t kNan16 = 0x7fffu;

float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

uint32_t packed(uint32_t low, uint32_t high) { return low | high << 16; }

}  // namespace

uint32_t pack_bfloat16(float low, float high) {
  const auto one = [](float x) { return std::isnan(x) ? kNan16 : uint32_t{bfloat16_from_float(x)}; };
  return packed(one(low), one(high));
}

uint32_t pack_float16(float low, float high) {
  const auto one = [](float x) { return std::isnan(x) ? kNan16 : uint32_t{float16_from_float(x)}; };
  return packed(one(low), one(high));
}

float exp2_approx(float value) { return flushed(std::exp2(flushed(value))); }

}  // namespace selfattn::cuda::ptx
