// The loops of peak.h, written once over the vectors of cpu/isa. A target region includes this file.
#pragma once

#include "peak.h"

namespace selfattn::cpu::SELFATTN_ISA {

namespace {

using PeakVec = Simd<float>::Vec;
constexpr int kPeakWidth = Simd<float>::kWidth;
// Two multiply-adds start in every cycle and end four or five cycles later: ten chains keep the units busy,
// and half of the registers hold more. The chains have two dimensions, because compilers unroll up to
// sixteen.
constexpr int kPeakRows = 3;
constexpr int kPeakChains = kPeakWidth == 16 ? 8 : 4;
constexpr int64_t kPrefetchBytes = 2048;

float peak_multiply_add(int64_t iterations) {
  PeakVec sums[kPeakRows][kPeakChains];
  // The chains start from different values, because compilers may keep only one of equal chains.
  SELFATTN_UNROLL
  for (int r = 0; r < kPeakRows; ++r) {
    SELFATTN_UNROLL
    for (int c = 0; c < kPeakChains; ++c) sums[r][c] = Simd<float>::set(float(r * kPeakChains + c));
  }
  const PeakVec factor = Simd<float>::set(0.75f), term = Simd<float>::set(0.125f);
  for (int64_t n = 0; n < iterations; ++n) {
    SELFATTN_UNROLL
    for (int r = 0; r < kPeakRows; ++r) {
      SELFATTN_UNROLL
      for (int c = 0; c < kPeakChains; ++c) sums[r][c] = Simd<float>::fma(sums[r][c], factor, term);
    }
  }
  PeakVec total = Simd<float>::set(0.0f);
  SELFATTN_UNROLL
  for (int r = 0; r < kPeakRows; ++r) {
    SELFATTN_UNROLL
    for (int c = 0; c < kPeakChains; ++c) total = Simd<float>::add(total, sums[r][c]);
  }
  float lanes[kPeakWidth];
  Simd<float>::store(lanes, total);
  return lanes[0];
}

float peak_sum(const float* data, int64_t count) {
  constexpr int kVecs = 8;
  constexpr int64_t kBlock = kVecs * kPeakWidth;
  constexpr int64_t kLine = 64 / sizeof(float);
  PeakVec sums[kVecs];
  SELFATTN_UNROLL
  for (int v = 0; v < kVecs; ++v) sums[v] = Simd<float>::set(0.0f);
  int64_t n = 0;
  for (; n + kBlock <= count; n += kBlock) {
    // A prefetch beyond the end is harmless, as it never faults.
    SELFATTN_UNROLL
    for (int64_t line = 0; line < kBlock; line += kLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(data + n + line) + kPrefetchBytes);
    }
    SELFATTN_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      sums[v] = Simd<float>::add(sums[v], Simd<float>::load(data + n + v * kPeakWidth));
    }
  }
  SELFATTN_UNROLL
  for (int v = 1; v < kVecs; ++v) sums[0] = Simd<float>::add(sums[0], sums[v]);
  float lanes[kPeakWidth];
  Simd<float>::store(lanes, sums[0]);
  float total = 0.0f;
  for (float lane : lanes) total += lane;
  for (; n < count; ++n) total += data[n];
  return total;
}

// Sums up blocks and prefetches as far ahead as the kernels for few queries do, in the order of the blocks.
float peak_sum_blocks(const float* const* blocks, int64_t count, int64_t floats) {
  constexpr int64_t kAhead = 8192 / sizeof(float), kLine = 64 / sizeof(float);
  constexpr int kVecs = static_cast<int>(kBlockFloats) / kPeakWidth;
  const int64_t blocks_ahead = kAhead / floats, floats_ahead = kAhead % floats;
  const auto block = [&](int64_t i) { return blocks[i < count ? i : count - 1]; };
  PeakVec sum[2] = {Simd<float>::set(0.0f), Simd<float>::set(0.0f)};
  for (int64_t i = 0; i < count; ++i) {
    const float* soon = block(i + blocks_ahead) + floats_ahead;
    const float* then = block(i + blocks_ahead + 1) + floats_ahead - floats;
    for (int64_t n = 0; n < floats; n += kBlockFloats) {
      const float* ahead = n + floats_ahead < floats ? soon + n : then + n;
      SELFATTN_UNROLL
      for (int64_t line = 0; line < kBlockFloats; line += kLine) __builtin_prefetch(ahead + line);
      SELFATTN_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        sum[v % 2] = Simd<float>::add(sum[v % 2], Simd<float>::load(blocks[i] + n + v * kPeakWidth));
      }
    }
  }
  float lanes[kPeakWidth];
  Simd<float>::store(lanes, Simd<float>::add(sum[0], sum[1]));
  float total = 0.0f;
  for (float lane : lanes) total += lane;
  return total;
}

constexpr PeakLoops peak_loops(const char* isa) {
  return {isa, 2.0 * kPeakRows * kPeakChains * kPeakWidth, &peak_multiply_add, &peak_sum, &peak_sum_blocks};
}

}  // namespace

}  // namespace selfattn::cpu::SELFATTN_ISA
