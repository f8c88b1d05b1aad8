// Dropout by the pattern of core/philox.h. One call of Philox serves four neighbouring keys of a query.
#pragma once

#include "../../core/attention_params.h"
#include "../../core/philox.h"
#include "device.cuh"

namespace selfattn::cuda {

template <class T>
class DropoutPattern {
 public:
  // Reads the seed from device memory.
  __device__ __forceinline__ DropoutPattern(const Dropout& dropout, int64_t batch, int64_t head)
      : enabled_(dropout.enabled), origin_{static_cast<uint32_t>(batch), static_cast<uint32_t>(head), 0, 0} {
    if (!enabled_) return;
    const DropoutOrigin first = dropout_origin(dropout);
    origin_.batch += first.batch;
    origin_.head += first.head;
    origin_.query = first.query;
    origin_.key_group = first.key_group;
    seed_ = static_cast<uint64_t>(*dropout.seed);
    // A threshold of 2^32 drops everything, but does not fit. Its keep_scale_ of 0 drops the rest.
    const uint64_t exact = dropout_threshold(dropout.probability);
    threshold_ = exact > 0xffffffffu ? 0xffffffffu : static_cast<uint32_t>(exact);
    keep_scale_ = static_cast<T>(dropout_keep_scale(dropout.probability));
  }

  __device__ __forceinline__ bool enabled() const { return enabled_; }

  // The random words of keys 4 * (key / 4) .. + 3, for the head that lies `more_heads` behind this one.
  __device__ __forceinline__ Philox4 words(int64_t query, int64_t key, int more_heads = 0) const {
    return philox(seed_, origin_.key_group + static_cast<uint32_t>(key >> 2),
                  origin_.query + static_cast<uint32_t>(query),
                  origin_.head + static_cast<uint32_t>(more_heads), origin_.batch);
  }

  // The factor of a key's weight: 0 or 1 / (1 - probability). `words` must be those of its group of four
  // keys. The choice among them uses no array, because one that is indexed at run time would lie in memory.
  __device__ __forceinline__ T factor(const Philox4& words, int64_t key) const {
    const uint32_t even = key & 2 ? words.word[2] : words.word[0];
    const uint32_t odd = key & 2 ? words.word[3] : words.word[1];
    return (key & 1 ? odd : even) < threshold_ ? T(0) : keep_scale_;
  }

 private:
  bool enabled_;
  DropoutOrigin origin_;  // of this batch element and head
  uint64_t seed_ = 0;
  uint32_t threshold_ = 0;
  T keep_scale_ = T(1);
};

}  // namespace selfattn::cuda
