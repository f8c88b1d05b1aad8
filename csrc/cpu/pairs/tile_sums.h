// Sums of tile products in memory, and the vector work that runs beside later products.
#pragma once

#include "pair_product.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Where 32 rows by 32 lanes of C belong; data is nullptr if there are none. Strides count words.
struct TileSums {
  float* data = nullptr;
  int64_t row = 0;
};

// The work beside a product that has none.
struct NoWork {
  SELFATTN_INLINE bool more() const { return false; }
  SELFATTN_INLINE void step() {}
  SELFATTN_INLINE void reach(const float*) {}
};

// Adds up products of several pieces. Each product has a sum of its own, which vectors add in float to where
// it belongs, beside later products of tiles. A sum is in memory when the next product has begun, so it is
// added beside the product after that, which takes its place. Sums are added in the order of the products.
class SumsBeside {
 public:
  static constexpr int64_t kSize = 32 * 32;  // numbers of a sum; adding one takes 16 steps

  SELFATTN_INLINE SumsBeside(float* place, float* other_place) : older_{place, {}}, newer_{other_place, {}} {}

  // Returns where the next product leaves its sum, which belongs to `to`. finish() must be called before that
  // product ends.
  SELFATTN_INLINE TileSums take(const TileSums& to) {
    begin(older_);
    float* const place = older_.place;
    older_ = newer_;
    newer_ = {place, to};
    return {place, 32};
  }
  SELFATTN_INLINE bool more() const { return from_ != end_; }
  SELFATTN_INLINE void step() {
    add_row(to_, from_);
    add_row(to_ + row_, from_ + 32);
    to_ += 2 * row_;
    from_ += 64;
  }
  SELFATTN_INLINE void finish() {
    while (more()) step();
  }
  // Adds the last two sums, which must be in memory.
  SELFATTN_INLINE void flush() {
    begin(older_);
    finish();
    begin(newer_);
    finish();
    older_.to = newer_.to = {};
  }

 private:
  struct Waiting {
    float* place;
    TileSums to;
  };

  SELFATTN_INLINE void begin(const Waiting& sum) {
    from_ = sum.place;
    end_ = sum.to.data != nullptr ? from_ + kSize : from_;
    to_ = sum.to.data;
    row_ = sum.to.row;
  }
  static SELFATTN_INLINE void add_row(float* to, const float* from) {
    const __m512 first = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(from));
    const __m512 second = _mm512_add_ps(_mm512_loadu_ps(to + 16), _mm512_loadu_ps(from + 16));
    _mm512_storeu_ps(to, first);
    _mm512_storeu_ps(to + 16, second);
  }

  const float *from_ = nullptr, *end_ = nullptr;  // of the sum that is being added
  float* to_ = nullptr;
  int64_t row_ = 0;
  Waiting older_, newer_;
};

}  // namespace selfattn::cpu::SELFATTN_ISA
