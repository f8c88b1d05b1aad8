// How fast this processor can go at best, measured: what the times of the kernels are compared with. Nothing
// here is on the way of a call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "../cpu/parallel.h"

namespace selfattn::cpu {

// Loops that do nothing but what is measured, for one instruction set.
struct PeakLoops {
  const char* isa;
  double operations;  // multiplications and additions of one iteration of multiply_add
  // Independent chains of multiply-adds. Returns something of every result, so that none can be left out.
  float (*multiply_add)(int64_t iterations);
  float (*sum)(const float* data, int64_t count);  // nullable
  // Of `count` blocks of `floats` numbers each, a multiple of kBlockFloats. Nullable.
  float (*sum_blocks)(const float* const* blocks, int64_t count, int64_t floats);
};

constexpr int64_t kBlockFloats = 128;

// GFLOP/s of multiply-adds on all threads of the pool at once, the best of the runs in `seconds`. `isa` is
// one of "avx512", "avx2", "scalar" (float32), "avx512_bf16", "amx" (bfloat16 into float32). Throws
// std::invalid_argument for a name that is unknown or that this machine lacks.
double multiply_add_gflops(const std::string& isa, double seconds, const ThreadPool& pool);

// Memory to be read as fast as possible. A size that fits into a cache measures the cache.
class MemoryReader {
 public:
  // Throws std::invalid_argument for less than four bytes.
  explicit MemoryReader(int64_t bytes);
  // The seconds in which all threads of the pool together read all of it once, each its own part: in its
  // order, or in blocks of that many bytes in random order. Throws std::invalid_argument for blocks that are
  // not whole multiples of 512 bytes, or longer than the memory.
  double seconds(const ThreadPool& pool, int64_t block_bytes = 0) const;
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(float)); }

 private:
  int64_t count_;
  std::unique_ptr<float[]> data_;
};

// GB/s of such reading, the best of the runs in `seconds`.
double read_gbs(int64_t bytes, double seconds, const ThreadPool& pool);

}  // namespace selfattn::cpu
