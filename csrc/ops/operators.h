// The operators that run on CPU and CUDA tensors, as the dispatcher calls them.
//
// Each checks its arguments and allocates its results; the rest depends on the device and is an Engine's.
#pragma once

#include "stable.h"

namespace selfattn::ops {

void attention_forward(StableIValue* values, uint64_t, uint64_t);
void attention_backward(StableIValue* values, uint64_t, uint64_t);
void attention_jvp(StableIValue* values, uint64_t, uint64_t);
void attention_backward_backward(StableIValue* values, uint64_t, uint64_t);
void attention_captured_gradients(StableIValue* values, uint64_t, uint64_t);
void attention_refusals(StableIValue* values, uint64_t, uint64_t);
void attention_weights(StableIValue* values, uint64_t, uint64_t);
void append_to_cache(StableIValue* values, uint64_t, uint64_t);
void attention_with_cache(StableIValue* values, uint64_t, uint64_t);
void attention_scores(StableIValue* values, uint64_t, uint64_t);
void attention_scores_backward(StableIValue* values, uint64_t, uint64_t);
void masked_softmax(StableIValue* values, uint64_t, uint64_t);
void masked_softmax_backward(StableIValue* values, uint64_t, uint64_t);
void basic_attention(StableIValue* values, uint64_t, uint64_t);
void basic_attention_forward(StableIValue* values, uint64_t, uint64_t);
void basic_attention_backward(StableIValue* values, uint64_t, uint64_t);

}  // namespace selfattn::ops
