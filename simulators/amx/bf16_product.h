// The arithmetic of TDPBF16PS.
#pragma once

#include "tiles.h"

namespace amx_emulator {

struct ProductShape {
  int rows, pairs, columns;
};

// result[m][n] += Σₖ a[m][2k]·b[k][2n] + Σₖ a[m][2k+1]·b[k][2n+1]: a and b are bfloat16, the result is float,
// and the two sums are separate chains of float fused multiply-adds in the order of k. The product rounds to
// nearest even, takes subnormal numbers as zero and gives none, whatever the caller's MXCSR says.
void bf16_product(const ProductShape& shape, TileRows& result, const TileRows& a, const TileRows& b);

// The two ways to compute it, which give the same bits: with the processor's fused multiply-add, and without.
bool has_fma();
void bf16_product_fma(const ProductShape& shape, TileRows& result, const TileRows& a, const TileRows& b);
void bf16_product_baseline(const ProductShape& shape, TileRows& result, const TileRows& a, const TileRows& b);

}  // namespace amx_emulator
