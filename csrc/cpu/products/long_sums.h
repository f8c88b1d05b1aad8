// How long sums are broken. The rounding errors of one chain of additions grow with its terms; those of sums
// of its parts, added up one after another, grow with the terms of a part and the number of parts. Scores, dP
// and delta are sums over a head dim, and what scores lose there the softmax multiplies.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

// Short sums are one part: they are as exact as those of a matrix library, which keeps as many in registers.
constexpr int64_t kMostTerms = 128;
constexpr int64_t kTermsOfPart = 64;

// Of a sum of so many terms: one order, wherever it is made.
inline int64_t terms_of_part(int64_t terms) { return terms <= kMostTerms ? terms : kTermsOfPart; }

}  // namespace selfattn::cpu::SELFATTN_ISA
