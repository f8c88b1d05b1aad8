// attention_with_cache: append_to_cache and attention_forward as one step of a decoder.
//
// Everything that either of them could refuse is refused before the first write, so that a wrong argument
// leaves the cache as it was. A step also costs only one call.
#include "attention_forward.h"
#include "append_arguments.h"
#include "operators.h"

namespace selfattn::ops {

void attention_with_cache(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  TensorHandle query = stack.tensor();
  const TensorHandle key_cache = stack.tensor();
  const TensorHandle value_cache = stack.tensor();
  TensorHandle key = stack.tensor();
  TensorHandle value = stack.tensor();
  const double scale = stack.number();
  const bool need_weights = stack.flag();
  Options options(stack);

  if (!options.seqlens_k) refuse("seqlens_k must be given: the lengths of the cache with the new keys");
  // The append comes first, because it may move the caches to memory of their own.
  const AppendTensors tensors = {
      key_cache, value_cache, key, value, options.seqlens_k, options.cu_seqlens_q, options.block_table};
  const Append append(tensors, true);
  append.caches.keep_apart("query", query);
  append.caches.keep_apart("attn_mask", options.attn_mask);
  append.caches.keep_apart("alibi_slopes", options.alibi_slopes);
  append.caches.keep_apart("sinks", options.sinks);
  append.caches.keep_apart("query_offsets", options.query_offsets);
  const ForwardCall call(query, key_cache, value_cache, scale, options);
  Output out = call.allocate_out("out");
  Output row_max = call.allocate_statistic("row_max");
  Output row_sum = call.allocate_statistic("row_sum");
  if (need_weights) call.require_weights();
  append.run();
  run_forward(call, options.kernel_name, out, row_max.data, row_sum.data, nullptr);
  stack.put(out.handle, row_max.handle, row_sum.handle);
}

}  // namespace selfattn::ops
