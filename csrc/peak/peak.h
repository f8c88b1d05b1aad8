// Measures the peak speed of this processor, with which benchmarks compare the kernels. No attention call
// runs any of this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "../cpu/parallel.h"

namespace selfattn::cpu {

// The loops of one instruction set, which do nothing but what is measured.
struct PeakLoops {
  const char* isa;
  double operations;  // multiplications and additions of one iteration of multiply_add
  // Runs independent chains of multiply-adds. What it returns depends on every chain, so that compilers can
  // leave none out.
  float (*multiply_add)(int64_t iterations);
  float (*sum)(const float* data, int64_t count);  // nullable
  // Sums up `count` blocks of `floats` numbers each, a multiple of kBlockFloats. Nullable.
  float (*sum_blocks)(const float* const* blocks, int64_t count, int64_t floats);
};

constexpr int64_t kBlockFloats = 128;

// Returns the GFLOP/s of multiply-adds on all threads of the pool at once, the best of the runs in `seconds`.
// `isa` is one of "avx512", "avx2", "neon", "scalar" (float32), "avx512_bf16", "amx" (bfloat16 into float32).
// Throws std::invalid_argument for a name that is unknown or that this machine lacks.
double multiply_add_gflops(const std::string& isa, double seconds, const ThreadPool& pool);

// Memory to be read as fast as possible. A size that fits into a cache measures the cache.
class MemoryReader {
 public:
  // Throws std::invalid_argument for less than four bytes.
  explicit MemoryReader(int64_t bytes);
  // Returns the seconds in which all threads of the pool together read all of it once, each its own part: in
  // order, or in blocks of `block_bytes` in random order. Throws std::invalid_argument for blocks that are
  // not whole multiples of 512 bytes, or longer than the memory.
  double seconds(const ThreadPool& pool, int64_t block_bytes = 0) const;
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(float)); }

 private:
  int64_t count_;
  std::unique_ptr<float[]> data_;
};

// Returns the GB/s of such reading, the best of the runs in `seconds`.
double read_gbs(int64_t bytes, double seconds, const ThreadPool& pool);

}  // namespace selfattn::cpu
