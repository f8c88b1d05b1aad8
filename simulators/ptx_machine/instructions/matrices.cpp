// Executes ldmatrix and mma.
#include "instructions/tensor_core.h"
#include "instructions/access.h"
#include "instructions/choosers.h"
#include "instructions/small_numbers.h"
#include "options.h"

namespace ptx_machine {

namespace {

constexpr u32 kRowBytes = 16;
constexpr int kRows = 8;  // rows, and columns, of a matrix of 16-bit elements
constexpr int kMostMatrices = 4;

u16 element(const u8* row, int column) {
  u16 value;
  std::memcpy(&value, row + 2 * column, sizeof(value));
  return value;
}

// operands: the address of a row, the registers. Lane l gives row l % 8 of matrix l / 8. Lanes beyond those
// of the matrices give addresses that are not read.
void load_matrix(Warp& warp, const Instruction& ins, u32) {
  const bool transposed = ins.variant != 0;
  MemoryAccess access;
  access.wide = ins.wide;
  access.space = Space::kShared;
  access.bytes = kRowBytes;
  access.added = ins.immediate;
  u8* rows[kLanes];
  const u32 giving = ins.count == kMostMatrices ? kWholeWarp : (1u << (kRows * ins.count)) - 1;
  resolve(warp, ins, giving, access, rows);
  u32 results[kMostMatrices][kLanes];
  for (int n = 0; n < ins.count; ++n) {
    for (int l = 0; l < kLanes; ++l) {
      const int pair = 2 * (l % 4), other = l / 4;
      u8* const* matrix = rows + kRows * n;
      const u32 low = transposed ? element(matrix[pair], other) : element(matrix[other], pair);
      const u32 high = transposed ? element(matrix[pair + 1], other) : element(matrix[other], pair + 1);
      results[n][l] = high << 16 | low;
    }
  }
  for (int n = 0; n < ins.count; ++n) {
    std::memcpy(warp.target<u32>(ins, 1 + n), results[n], sizeof results[n]);
  }
}

// Computes d = a b + c. operands: d[4], a[4], b[2], c[4]. A register of all lanes, seen as 16-bit elements,
// is a matrix of 8 rows of a, or of 8 columns of b; one of the accumulator is 8 rows of 4 pairs.
template <float (*kConvert)(u16)>
void multiply(Warp& warp, const Instruction& ins, u32) {
  MmaOperands operands;
  operands.smallest_exponent =
      kConvert == float_from_float16 ? kSmallestExponentFloat16 : kSmallestExponentFloat32;
  float elements[2 * kLanes];
  const auto convert = [&](int place) {
    const u16* bits = reinterpret_cast<const u16*>(warp.source<u32>(ins, place));
    for (int n = 0; n < 2 * kLanes; ++n) elements[n] = kConvert(bits[n]);
  };
  for (int n = 0; n < 4; ++n) {
    convert(4 + n);
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(&operands.a[row + kRows * (n % 2)][kRows * (n / 2)], elements + kRows * row,
                  kRows * sizeof(float));
    }
  }
  for (int n = 0; n < 2; ++n) {
    convert(8 + n);
    for (int column = 0; column < kRows; ++column) {
      for (int k = 0; k < kRows; ++k) operands.b[kRows * n + k][column] = elements[kRows * column + k];
    }
  }
  for (int n = 0; n < 4; ++n) {
    const float* c = warp.source<float>(ins, 10 + n);
    for (int l = 0; l < kLanes; ++l) operands.d[l / 4 + kRows * (n / 2)][2 * (l % 4) + n % 2] = c[l];
  }
  multiply_accumulate(operands, options().capability);
  for (int n = 0; n < 4; ++n) {
    float* d = warp.target<float>(ins, n);
    for (int l = 0; l < kLanes; ++l) d[l] = operands.d[l / 4 + kRows * (n / 2)][2 * (l % 4) + n % 2];
  }
}

bool choose_ldmatrix(Statement& statement) {
  Instruction& ins = statement.instruction;
  if (!statement.has("m8n8") || !statement.has("b16") || !statement.has("shared")) return false;
  ins.variant = statement.has("trans") ? 1 : 0;
  ins.count = static_cast<u8>(1 << statement.which({"x1", "x2", "x4"}, 0));
  ins.immediate = statement.address(statement.operands.at(1), 0);
  const auto& results = statement.operands.at(0).list;
  if (results.size() != ins.count) return false;
  for (size_t n = 0; n < results.size(); ++n) ins.operands[1 + n] = statement.builder.source(results[n], 32);
  ins.handler = &load_matrix;
  return true;
}

bool choose_mma(Statement& statement) {
  Instruction& ins = statement.instruction;
  const size_t sizes[] = {4, 4, 2, 4};
  size_t place = 0;
  for (size_t n = 0; n < 4; ++n) {
    const auto& parts = statement.operands.at(n).list;
    if (parts.size() != sizes[n]) return false;
    for (const Operand& part : parts) ins.operands[place++] = statement.builder.source(part, 32);
  }
  std::string form;
  for (size_t n = 3; n < statement.words.size(); ++n) form += "." + statement.words[n];
  if (form == ".m16n8k16.row.col.f32.bf16.bf16.f32") ins.handler = &multiply<float_from_bfloat16>;
  if (form == ".m16n8k16.row.col.f32.f16.f16.f32") ins.handler = &multiply<float_from_float16>;
  return ins.handler != nullptr;
}

}  // namespace

bool choose_matrix(Statement& statement) {
  if (!statement.has("sync") || !statement.has("aligned")) return false;
  statement.instruction.kind = Kind::kWholeWarp;
  return statement.name() == "mma" ? choose_mma(statement) : choose_ldmatrix(statement);
}

}  // namespace ptx_machine
