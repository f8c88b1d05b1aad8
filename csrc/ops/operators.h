// The operators that run on CPU and CUDA tensors, as the dispatcher calls them.
//
// Each checks its arguments and allocates its results; the rest depends on the device and is an Engine's.
#pragma once

#include "stable.h"

namespace selfattn::ops {

void attention_forward(StableIValue* values, uint64_t, uint64_t);
void attention_statistics(StableIValue* values, uint64_t, uint64_t);
void attention_backward(StableIValue* values, uint64_t, uint64_t);
void attention_jvp(StableIValue* values, uint64_t, uint64_t);
void attention_backward_backward(StableIValue* values, uint64_t, uint64_t);
void attention_captured_gradients(StableIValue* values, uint64_t, uint64_t);
void attention_refusals(StableIValue* values, uint64_t, uint64_t);
void attention_weights(StableIValue* values, uint64_t, uint64_t);
void attention_weight_sums(StableIValue* values, uint64_t, uint64_t);
void sorted_selection(StableIValue* values, uint64_t, uint64_t);
void append_to_cache(StableIValue* values, uint64_t, uint64_t);
void attention_with_cache(StableIValue* values, uint64_t, uint64_t);
void statistics_with_cache(StableIValue* values, uint64_t, uint64_t);
void attention_scores(StableIValue* values, uint64_t, uint64_t);
void attention_scores_backward(StableIValue* values, uint64_t, uint64_t);
void masked_softmax(StableIValue* values, uint64_t, uint64_t);
void masked_softmax_backward(StableIValue* values, uint64_t, uint64_t);
// A basic operator takes nothing beside tensors, nothing and has the causal rule, takes everything, or takes
// packed sequences.
enum class Basic { kAlone, kCausal, kMasked, kPacked };
template <Basic kKind>
void basic_attention(StableIValue* values, uint64_t, uint64_t);
template <Basic kKind>
void basic_attention_forward(StableIValue* values, uint64_t, uint64_t);
template <Basic kKind>
void basic_attention_backward(StableIValue* values, uint64_t, uint64_t);

// Gives the dispatcher all of them, for one kind of device.
template <class Library>
void implement_operators(Library& library) {
  library.impl("attention_forward", &attention_forward);
  library.impl("attention_statistics", &attention_statistics);
  library.impl("attention_backward", &attention_backward);
  library.impl("attention_jvp", &attention_jvp);
  library.impl("attention_backward_backward", &attention_backward_backward);
  library.impl("attention_captured_gradients", &attention_captured_gradients);
  library.impl("attention_refusals", &attention_refusals);
  library.impl("attention_weights", &attention_weights);
  library.impl("attention_weight_sums", &attention_weight_sums);
  library.impl("sorted_selection", &sorted_selection);
  library.impl("append_to_cache", &append_to_cache);
  library.impl("attention_with_cache", &attention_with_cache);
  library.impl("statistics_with_cache", &statistics_with_cache);
  library.impl("attention_scores", &attention_scores);
  library.impl("attention_scores_backward", &attention_scores_backward);
  library.impl("masked_softmax", &masked_softmax);
  library.impl("masked_softmax_backward", &masked_softmax_backward);
  library.impl("basic_attention", &basic_attention<Basic::kAlone>);
  library.impl("causal_attention", &basic_attention<Basic::kCausal>);
  library.impl("masked_attention", &basic_attention<Basic::kMasked>);
  library.impl("packed_attention", &basic_attention<Basic::kPacked>);
  library.impl("basic_attention_forward", &basic_attention_forward<Basic::kAlone>);
  library.impl("causal_attention_forward", &basic_attention_forward<Basic::kCausal>);
  library.impl("masked_attention_forward", &basic_attention_forward<Basic::kMasked>);
  library.impl("packed_attention_forward", &basic_attention_forward<Basic::kPacked>);
  library.impl("basic_attention_backward", &basic_attention_backward<Basic::kAlone>);
  library.impl("causal_attention_backward", &basic_attention_backward<Basic::kCausal>);
  library.impl("masked_attention_backward", &basic_attention_backward<Basic::kMasked>);
  library.impl("packed_attention_backward", &basic_attention_backward<Basic::kPacked>);
}

}  // namespace selfattn::ops
