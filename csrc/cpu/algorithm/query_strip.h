// A strip is a few vectors of neighbouring queries of one (batch, head), one query per lane. Everything about
// a strip is kept transposed: a block of scores is S^T, keys down the rows and queries across the lanes.
// Maximum, sum and masks of a row of the softmax are then plain vertical vector operations, and keys and
// values are used as they lie in memory.
#pragma once

#include "elementary.h"
#include "rows.h"
#include "thin_product.h"
#include "tile_multiply.h"

namespace selfattn::cpu::SELFATTN_ISA {

constexpr int64_t kKeyBlock = 64;  // keys per block of scores; a multiple of 4, the keys of one Philox call

template <class T>
constexpr int64_t kLanes =
    Simd<T>::kTileVecs * Simd<T>::kWidth;  // most queries of a strip, and every leading dimension

// Scratch memory in one aligned piece, handed out front to back.
class Arena {
 public:
  explicit Arena(int64_t bytes) : memory_(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
  ~Arena() { ::operator delete(memory_, std::align_val_t(64)); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ + used_;
    used_ += bytes_for<T>(count);
    return reinterpret_cast<T*>(piece);
  }
  template <class T>
  static int64_t bytes_for(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// The queries first .. first + count - 1 of (batch, head).
template <class T>
struct QueryStrip {
  int64_t batch, head, first, count;
  int64_t vecs;   // vectors in use
  KeyRange keys;  // all keys that some query of the strip may see by position
  bool thin;      // see thin_product.h
  T* query_t;     // [head_dim][kLanes] scale * Q^T; of a thin strip [count][padded head_dim] scale * Q

  static int64_t query_size(const AttentionParams& p) {
    return round_up_to_vector<T>(p.head_dim) * kLanes<T>;
  }

  void begin(const AttentionParams& p, int64_t batch_index, int64_t head_index, int64_t first_query,
             int64_t queries) {
    batch = batch_index;
    head = head_index;
    first = first_query;
    count = queries;
    vecs = (queries + Simd<T>::kWidth - 1) / Simd<T>::kWidth;
    keys = visible_keys(p, first, first + count - 1);
    thin = p.queries <= kThinQueries;
    const void* source = element(p.query.data, p.dtype, p.query.offset(batch, head, first));
    if (thin) {
      load_rows<T>(query_t, source, p.dtype, p.query.stride[2], count, p.head_dim, static_cast<T>(p.scale));
    } else {
      load_transposed<T>(query_t, kLanes<T>, source, p.dtype, p.query.stride[2], count, p.head_dim,
                         static_cast<T>(p.scale));
    }
  }
};

// How many queries the strip that starts at `first` takes. Depends on the number of queries only.
template <class T>
int64_t strip_queries(int64_t first, int64_t queries) {
  const int64_t rest = queries - first;
  const int64_t vecs = (rest + Simd<T>::kWidth - 1) / Simd<T>::kWidth;
  const int64_t take = next_tile_vecs<T>(vecs) * Simd<T>::kWidth;
  return take < rest ? take : rest;
}

}  // namespace selfattn::cpu::SELFATTN_ISA
