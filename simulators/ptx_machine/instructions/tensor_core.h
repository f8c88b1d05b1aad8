// The arithmetic of mma.sync, to the bit.
//
// A tensor core adds the products of one group of k to the accumulator in a single step: every product is
// exact, all terms are shifted to the largest exponent among them and truncated to a few bits beyond those of
// float32, their sum is exact, and the result is truncated, not rounded. Groups follow each other in the
// order of k. The length of a group and the bits that are kept differ between generations;
// tests/cuda/test_ptx_wrappers.py compares this with what mmasim (PyPI) answers, whose author measured
// devices.
#pragma once

namespace ptx_machine {

constexpr int kMmaRows = 16;
constexpr int kMmaColumns = 8;
constexpr int kMmaDepth = 16;

// The smallest exponent of a normal number, which subnormal numbers keep.
constexpr int kSmallestExponentFloat16 = -14;
constexpr int kSmallestExponentFloat32 = -126;  // and that of bfloat16

struct MmaOperands {
  int smallest_exponent = 0;
  float a[kMmaRows][kMmaDepth];
  float b[kMmaDepth][kMmaColumns];
  float d[kMmaRows][kMmaColumns];  // the accumulator, replaced by the result
};

// Computes d += a b as a device of this compute capability does.
void multiply_accumulate(MmaOperands& operands, int capability);

}  // namespace ptx_machine
