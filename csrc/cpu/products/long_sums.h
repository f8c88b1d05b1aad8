// How long sums are split into parts. The rounding errors of one chain of additions grow with its terms;
// those of sums of its parts, added up one after another, grow with the terms of a part and the number of
// parts. Scores, dP and delta are sums over a head dim, and the softmax multiplies the errors of scores.
#pragma once

namespace selfattn::cpu::SELFATTN_ISA {

// Short sums are one part: that is as exact as a matrix library, which sums as many terms in registers.
constexpr int64_t kMostTerms = 128;
constexpr int64_t kTermsOfPart = 64;

// The terms of a part. They depend on the terms of the sum alone, so that a sum has one order wherever it is
// made.
inline int64_t terms_of_part(int64_t terms) { return terms <= kMostTerms ? terms : kTermsOfPart; }

}  // namespace selfattn::cpu::SELFATTN_ISA
