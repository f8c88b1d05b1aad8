// Mends outputs whose sums overflowed. The forward adds up weights times values and divides by the sum of the
// weights at the end. For values near the largest number such a sum overflows, while the formula, which
// divides the weights first, has a mean of them. Elements that are not finite are therefore computed once
// more, here, in the formula's order. An element that is NaN or infinite in the formula stays so, and no
// finite element changes a bit.
#pragma once

#include "forward_strip.h"
#include "gradient_strip.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Computes a strip's queries against all keys from the forward's statistics: [value_dim][kLanes] sums of
// normalised weights times values.
template <class T>
void sum_normalised(const AttentionParams& p, const ForwardOutputs& outputs, ForwardStrip<T>& strip,
                    ForwardScratch<T>& scratch) {
  const int64_t row = p.row(strip.batch, strip.head, strip.first);
  strip.reset(p);
  for (int64_t lane = 0; lane < strip.vecs * Simd<T>::kWidth; ++lane) {
    const T most = lane < strip.count ? static_cast<const T*>(outputs.row_max)[row + lane] : T(0);
    const T sum = lane < strip.count ? static_cast<const T*>(outputs.row_sum)[row + lane] : T(0);
    strip.row_max[lane] = most == -std::numeric_limits<T>::infinity() ? T(0) : most;
    scratch.scale[lane] = sum == T(0) ? T(0) : T(1) / sum;
  }
  const int64_t kv_head = p.kv_head(strip.head);
  T* const weights = scratch.weights.block;
  for (int64_t key = strip.keys.begin / kKeyBlock * kKeyBlock; key < strip.keys.end; key += kKeyBlock) {
    const int64_t keys = smaller(strip.keys.end - key, kKeyBlock);
    T factor;
    scratch.keys.load(key_source(p, p.key, strip.batch, kv_head, key, keys, p.head_dim, scratch.paged_keys));
    scratch.values.load(
        key_source(p, p.value, strip.batch, kv_head, key, keys, p.value_dim, scratch.paged_values));
    if (!score_block<T>(p, strip, key, keys, scratch.keys, 0, scratch.block, weights, &factor)) continue;
    mark_visible<T>(strip, keys, weights, scratch.visible);
    normalise_block<T>(p, strip, keys, strip.row_max, scratch.scale, factor, true, weights);
    if (p.dropout.enabled) apply_dropout<T>(p.dropout, strip, key, keys, keep_scale<T>(p.dropout), weights);
    multiply_columns<T>(scratch.values, 0, keys, p.value_dim, scratch.weights, strip.count, {strip.out_t},
                        scratch.visible);
  }
}

// Replaces the elements that are not finite in the row of the outputs at `at` by sums, each kLanes after the
// one before.
template <class T>
void replace_not_finite(const AttentionParams& p, const ForwardOutputs& outputs, int64_t at, const T* sums) {
  for (int64_t e = 0; e < p.value_dim; ++e) {
    const T before = load_element<T>(outputs.out.data, p.dtype, at + e);
    if (before - before == T(0)) continue;
    const T sum = sums[e * kLanes<T>];
    store_element<T>(outputs.out.data, p.dtype, at + e, sum);
    if (outputs.out_residual == nullptr) continue;
    const T stored = load_element<T>(outputs.out.data, p.dtype, at + e);
    store_element<T>(outputs.out_residual, p.dtype, at + e, sum - stored);
  }
}

// Replaces the elements that are not finite in the outputs of queries first .. first + count - 1, at most
// kLanes, whose statistics are stored. It is rare, so it allocates its own memory.
template <class T>
void mend_overflow(const AttentionParams& p, const ForwardOutputs& outputs, int64_t batch, int64_t head,
                   int64_t first, int64_t count) {
  Arena arena(bytes_of<ForwardScratch<T>>(p) + bytes_of<ForwardStrip<T>>(p));
  ForwardScratch<T> scratch;
  ForwardStrip<T> strip;
  scratch.allocate(p, arena);
  strip.allocate(p, arena);
  strip.begin(p, batch, head, first, count);
  sum_normalised<T>(p, outputs, strip, scratch);
  for (int64_t lane = 0; lane < count; ++lane) {
    replace_not_finite(p, outputs, outputs.out.offset(batch, head, first + lane), strip.out_t + lane);
  }
}

}  // namespace selfattn::cpu::SELFATTN_ISA
