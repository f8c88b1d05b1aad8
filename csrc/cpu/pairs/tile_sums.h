// What tile products leave in memory, and what may stand beside them: nothing, or the additions of earlier
// ones.
#pragma once

#include "pair_product.h"

namespace selfattn::cpu::SELFATTN_ISA {

// 32 rows by 32 lanes of C; nowhere, if there are none. Strides count words.
struct TileSums {
  float* data = nullptr;
  int64_t row = 0;
};

// What stands beside a product that has nothing beside it.
struct NoWork {
  SELFATTN_INLINE bool more() const { return false; }
  SELFATTN_INLINE void step() {}
  SELFATTN_INLINE void reach(const float*) {}
};

// Sums of products of several pieces. Each product has a sum of its own, which is added to where it belongs
// in float, by vectors beside products of tiles. A sum is in memory when the next product has begun, so it is
// added beside the one after that, which takes its place. They are added in the order of the products.
class SumsBeside {
 public:
  static constexpr int64_t kSize = 32 * 32;  // of a sum, which takes 16 steps

  SELFATTN_INLINE SumsBeside(float* place, float* other_place) : older_{place, {}}, newer_{other_place, {}} {}

  // Where the next product leaves its sum, which belongs to `to`. Before that product ends, finish() is due.
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
  // The last two, which have to be in memory.
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
