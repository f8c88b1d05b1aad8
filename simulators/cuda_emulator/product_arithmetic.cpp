#include "product_arithmetic.h"

#include <cstring>
#include <string>

#include "core/dtype.h"
#include "group_products.h"
#include "ptx_sm90_model.h"
#include "scheduler.h"
#include "shared_memory.h"
#include "swizzle.h"
#include "tensor_core.h"

namespace selfattn::emulator::products {

namespace {

constexpr int kPanelColumns = 64;
constexpr int kElementBytes = 2;
constexpr int kRowsOfStep = 8;  // rows of a matrix begin at their multiples

// A word describes a matrix by these bits: [8 of a mark][by rows][12 column][12 row][12 rows of a panel][14
// the panels' offset in shared memory, in 16 bytes].
constexpr uint64_t kMark = 0xa7;

struct Matrix {
  const unsigned char* panels;
  int panel_rows;
  int row;
  int column;
  bool by_rows;
  bool is_one;

  // Returns the address of the element at this place in the panels.
  const unsigned char* address(int at_row, int at_column) const {
    return swizzled(panels + (at_column / kPanelColumns * panel_rows + at_row) * kSwizzledRowBytes +
                    at_column % kPanelColumns * kElementBytes);
  }
  // Returns the address of element `depth` along the summed dimension, in row or column n of the product.
  const unsigned char* operand(int n, int depth) const {
    return by_rows ? address(row + depth, column + n) : address(row + n, column + depth);
  }
};

Matrix matrix_of(uint64_t word) {
  const auto bits = [word](int first, int count) {
    return static_cast<int>(word >> first & ((uint64_t{1} << count) - 1));
  };
  return {shared_memory().data() + bits(0, 14) * kChunkBytes,
          bits(14, 12),
          bits(26, 12),
          bits(38, 12),
          bits(50, 1) != 0,
          word >> 56 == kMark};
}

float value_of(const unsigned char* address, bool bfloat16) {
  uint16_t bits;
  std::memcpy(&bits, address, sizeof(bits));
  return bfloat16 ? float_from_bfloat16(bits) : float_from_float16(bits);
}

}  // namespace

uint64_t matrix(const void* panels, int panel_rows, int row, int column, bool by_rows, const Site& site) {
  require_hopper(site);
  // The texts are made only when they are needed, because every thread calls this often.
  const auto refuse = [&](const std::string& what) {
    fail(whereabouts() + " calls " + to_string(site) + " with " + what);
  };
  check_shared(panels, kSwizzledRowBytes, kSwizzleAlignment, site);
  if (panel_rows <= 0 || panel_rows % kRowsOfStep != 0 || panel_rows >= 1 << 12)
    refuse(std::to_string(panel_rows) + " rows of a panel, which are not a multiple of 8 below 4096");
  if (row < 0 || row % kRowsOfStep != 0 || row >= panel_rows)
    refuse("row " + std::to_string(row) + ", which is not a multiple of 8 in its panel");
  const int step = by_rows ? kPanelColumns : kProductDepth;
  if (column < 0 || column % step != 0 || column >= 1 << 12)
    refuse("column " + std::to_string(column) + ", which is not a multiple of " + std::to_string(step));
  const auto offset =
      static_cast<uint64_t>(static_cast<const unsigned char*>(panels) - shared_memory().data());
  return kMark << 56 | uint64_t{by_rows} << 50 | static_cast<uint64_t>(column) << 38 |
         static_cast<uint64_t>(row) << 26 | static_cast<uint64_t>(panel_rows) << 14 | offset / kChunkBytes;
}

void check_matrix(uint64_t word, int extent, bool turned, const Site& site) {
  const Matrix matrix = matrix_of(word);
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) fail(whereabouts() + " gives " + to_string(site) + " " + what);
  };
  require(matrix.is_one, "a word that is no matrix");
  require(matrix.by_rows == turned, matrix.by_rows ? "matrix_by_rows() for an operand that is not turned"
                                                   : "matrix_by_columns() for an operand that is turned");
  const int rows = turned ? kProductDepth : extent;
  require(matrix.row + rows <= matrix.panel_rows, "the rows " + std::to_string(matrix.row) + " to " +
                                                      std::to_string(matrix.row + rows - 1) +
                                                      " of panels of " + std::to_string(matrix.panel_rows));
  const int last_column = matrix.column + (turned ? extent : kProductDepth) - 1;
  const unsigned char* const end =
      matrix.panels +
      ((last_column / kPanelColumns * matrix.panel_rows + matrix.row + rows) * kSwizzledRowBytes);
  require(end <= shared_memory().data() + shared_memory().bytes(),
          "a matrix that ends at byte " + std::to_string(end - shared_memory().data()) + " of " +
              std::to_string(shared_memory().bytes()) + " bytes of shared memory");
}

void for_rows(uint64_t word, int extent, bool turned, const Site&,
              const std::function<void(const void*, int)>& visit) {
  const Matrix matrix = matrix_of(word);
  constexpr int kElements = kChunkBytes / kElementBytes;
  const int rows = turned ? kProductDepth : extent, columns = turned ? extent : kProductDepth;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; column += kElements)
      visit(matrix.address(matrix.row + row, matrix.column + column), kChunkBytes);
  }
}

void Operands64::take_left(const std::array<std::array<uint32_t, 4>, 128>& registers, bool bfloat16) {
  for (int thread = 0; thread < kGroupThreads; ++thread) {
    const int first_row = thread / kWarpSize * kMmaRows, lane = thread % kWarpSize;
    for (int r = 0; r < 4; ++r) {
      const int row = first_row + lane / 4 + 8 * (r % 2);
      for (int half = 0; half < 2; ++half) {
        const int depth = 2 * (lane % 4) + 8 * (r / 2) + half;
        const auto bits = static_cast<uint16_t>(
            registers[static_cast<size_t>(thread)][static_cast<size_t>(r)] >> (16 * half));
        left_[static_cast<size_t>(row * kProductDepth + depth)] =
            bfloat16 ? float_from_bfloat16(bits) : float_from_float16(bits);
      }
    }
  }
}

void Operands64::read_left(uint64_t word, bool bfloat16) {
  const Matrix matrix = matrix_of(word);
  for (int row = 0; row < kProductRows; ++row) {
    for (int depth = 0; depth < kProductDepth; ++depth) {
      left_[static_cast<size_t>(row * kProductDepth + depth)] =
          value_of(matrix.operand(row, depth), bfloat16);
    }
  }
}

void Operands64::read_right(uint64_t word, int columns, bool bfloat16) {
  const Matrix matrix = matrix_of(word);
  columns_ = columns;
  right_.resize(static_cast<size_t>(kProductDepth * columns));
  for (int depth = 0; depth < kProductDepth; ++depth) {
    for (int column = 0; column < columns; ++column) {
      right_[static_cast<size_t>(depth * columns + column)] =
          value_of(matrix.operand(column, depth), bfloat16);
    }
  }
}

void Operands64::multiply(float* d, bool adds, bool bfloat16) const {
  constexpr int kHopper = 90;
  const int each = columns_ / 2;
  MmaOperands matrices;
  matrices.smallest_exponent = bfloat16 ? kSmallestExponentFloat32 : kSmallestExponentFloat16;
  for (int first_row = 0; first_row < kProductRows; first_row += kMmaRows) {
    std::memcpy(matrices.a, left_.data() + first_row * kProductDepth, sizeof(matrices.a));
    for (int first = 0; first < columns_; first += kMmaColumns) {
      for (int depth = 0; depth < kMmaDepth; ++depth)
        std::memcpy(matrices.b[depth], right_.data() + depth * columns_ + first, sizeof(matrices.b[depth]));
      // The accumulator lies in the lanes as the accumulator of mma does.
      const auto in_lane = [&](int lane, int r) -> float& {
        return d[(first_row / kMmaRows * kWarpSize + lane) * each + first / 2 + r];
      };
      const auto in_matrix = [&](int lane, int r) -> float& {
        return matrices.d[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
      };
      for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int r = 0; r < 4; ++r) in_matrix(lane, r) = adds ? in_lane(lane, r) : 0.0f;
      }
      multiply_accumulate(matrices, kHopper);
      for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int r = 0; r < 4; ++r) in_lane(lane, r) = in_matrix(lane, r);
      }
    }
  }
}

}  // namespace selfattn::emulator::products
