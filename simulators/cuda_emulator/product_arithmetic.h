// The matrices of a warpgroup's product in shared memory, and their product.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "site.h"

namespace selfattn::emulator::products {

constexpr int kProductRows = 64;
constexpr int kProductDepth = 16;

// Fails unless the word describes a matrix whose `extent` rows (columns if it is turned) lie in its panels.
void check_matrix(uint64_t matrix, int extent, bool turned, const Site& site);

// Calls visit(first byte, bytes) for the chunks of 16 bytes that hold the matrix.
void for_rows(uint64_t matrix, int extent, bool turned, const Site& site,
              const std::function<void(const void*, int)>& visit);

class Operands64 {
 public:
  // Takes the left operand from the registers of 128 threads: fragments of 16 rows for each warp.
  void take_left(const std::array<std::array<uint32_t, 4>, 128>& registers, bool bfloat16);
  // Reads the left operand from shared memory. The word says whether it is turned.
  void read_left(uint64_t matrix, bool bfloat16);
  void read_right(uint64_t matrix, int columns, bool bfloat16);
  // `d` holds the registers of 128 threads, one thread after the other.
  void multiply(float* d, bool adds, bool bfloat16) const;

 private:
  int columns_ = 0;
  std::vector<float> left_ = std::vector<float>(kProductRows * kProductDepth);  // [row][depth]
  std::vector<float> right_;                                                    // [depth][column]
};

}  // namespace selfattn::emulator::products
