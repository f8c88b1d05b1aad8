// The schema of every op, and the registration of the ops for CPU tensors.
//
// Rare options are keyword-only with defaults: a caller that leaves them out saves their conversion.
// attention_options.h lists the options that the attention operators share.
#include <string>

#include "attention_options.h"
#include "operators.h"
#include "stable.h"
#include "tangent_arguments.h"

#include <torch/csrc/stable/library.h>

// need_weights says that attention_weights will be called, so that a lack of memory for its result is an
// error now, before anything is computed or written.
STABLE_TORCH_LIBRARY(SELFATTN_NAMESPACE, library) {
  const std::string options = selfattn::ops::Options::schema();
  // Gradients of statistics of scores, see Note [Statistics of scores].
  const std::string statistics = "Tensor? grad_mean=None, Tensor? grad_sink=None, Tensor? grad_keys=None, ";
  const auto define = [&library](const std::string& schema) { library.def(schema.c_str()); };
  define(
      "attention_forward(Tensor query, Tensor key, Tensor value, float scale, *, "
      "bool need_residual=False, bool need_weights=False, " +
      options + ") -> (Tensor out, Tensor row_max, Tensor row_sum, Tensor out_residual)");
  // The same with two more numbers of each row: Note [Statistics of scores] in csrc/core/attention_params.h.
  define(
      "attention_statistics(Tensor query, Tensor key, Tensor value, float scale, *, "
      "bool need_residual=False, bool need_weights=False, " +
      options +
      ") -> (Tensor out, Tensor row_max, Tensor row_sum, Tensor out_residual, Tensor row_top, "
      "Tensor row_mean)");
  // Returns a text for people: a line per kernel of the device, best first, that says why the kernel does not
  // take this call. The line is empty if it does.
  define("attention_refusals(Tensor query, Tensor key, Tensor value, float scale, *, " + options +
         ") -> str");
  define("attention_weights(Tensor query, Tensor key, Tensor row_max, Tensor row_sum, float scale, *, " +
         options + ") -> Tensor");
  // Returns the sum of each key's weights before dropout, (B,H,S) or, of packed keys, (1,H,rows). With
  // per_key of that shape it returns the sum of each query's weights times these numbers, shaped as row_max.
  define(
      "attention_weight_sums(Tensor query, Tensor key, Tensor row_max, Tensor row_sum, float scale, *, "
      "Tensor? per_key=None, " +
      options + ") -> Tensor");
  define(
      "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor row_max, Tensor row_sum, float scale, *, "
      "Tensor? out_residual=None, Tensor? grad_row=None, Tensor? grad_weights=None, " +
      statistics + "bool need_mask_grad=False, " + options +
      ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
      "Tensor grad_mask, Tensor grad_slopes, Tensor grad_sinks)");
  // Computes attention_forward and its forward mode; a tangent that is missing is 0.
  define("attention_jvp(Tensor query, Tensor key, Tensor value, float scale, *, " +
         selfattn::ops::TangentTensors::schema() + "bool need_residual=False, " + options +
         ") -> (Tensor out, Tensor row_max, Tensor row_sum, Tensor out_residual, Tensor tangent_out, "
         "Tensor tangent_lse)");
  // Second derivatives, by Note [Second derivatives] in csrc/core/tangents.h: the gradients of <grad_out,
  // tangent_out> - <grad_row, tangent_lse>. The tangents of a backward's results are its cotangents.
  define(
      "attention_backward_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor row_max, Tensor row_sum, float scale, *, " +
      selfattn::ops::TangentTensors::schema() +
      "Tensor? out_residual=None, Tensor? grad_row=None, bool need_mask_grad=False, " + options +
      ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_slopes, "
      "Tensor grad_sinks, Tensor tangent_out, Tensor tangent_lse)");
  // Returns the gradients of the tensors in `captured` end to end, in float64. captured_sizes holds the
  // number of elements of each, or 0 if its gradient is not wanted. exclusive is the sum of 1, 2 and 4 if
  // scores of different batch elements, heads and queries, respectively, read different elements of each
  // tensor.
  define(
      "attention_captured_gradients(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor row_max, Tensor row_sum, float scale, *, SymInt[] captured_sizes, int exclusive=0, "
      "Tensor? out_residual=None, Tensor? grad_row=None, Tensor? grad_weights=None, " +
      statistics + options + ") -> Tensor");
  // Of the basic operators, those called causal have the causal rule, and those called masked have a mask,
  // which broadcasts to (B,H,L,S) and whose first dimensions may be missing. Overloads of one name would be
  // shorter, but torch 2.13 aborts when a library with three of one name is unloaded.
  for (const std::string name : {"basic_attention", "causal_attention", "masked_attention"}) {
    const bool masked = name == "masked_attention";
    const std::string arguments =
        std::string("(Tensor query, Tensor key, Tensor value") +
        (masked ? ", Tensor? attn_mask, float? scale, bool is_causal, bool enable_gqa" : "");
    define(name + arguments + ") -> Tensor");
    define(name + "_forward" + arguments + ") -> (Tensor out, Tensor statistics, Tensor out_residual)");
    define(
        name +
        "_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor statistics" +
        (masked ? ", Tensor? out_residual, Tensor? attn_mask, float? scale, bool is_causal" : "") +
        ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
  }
  // Those called packed take packed rows as users have them, (rows,H|Hk,E|Ev), and int32 or int64 offsets
  // (B+1,) of the CPU. They return these as one int64 tensor (2,B+1), as callers overwrite theirs before a
  // backward.
  const std::string rules = "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, bool is_causal";
  const std::string packed =
      "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, " + rules +
      ", bool enable_gqa) -> ";
  define("packed_attention" + packed + "Tensor");
  define("packed_attention_forward" + packed +
         "(Tensor out, Tensor statistics, Tensor out_residual, Tensor offsets)");
  define(
      "packed_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor statistics, Tensor? out_residual, Tensor offsets, " +
      rules + ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
  // Returns lists for `selection`, of what each row of indices (B,H,rows,K), int32 or int64, holds in any
  // order and any number of times: numbers below `blocks`, or -1. On the CPU alone.
  define("sorted_selection(Tensor indices, SymInt blocks) -> Tensor");
  // Writes key and value (B,Hk,L,E|Ev) behind the seqlens (B,) rows of the caches, which are (B,Hk,S,E|Ev)
  // or, with a block_table, pages as in attention_options.h. With cu_seqlens (B+1,), key and value are
  // packed, (1,Hk,rows,E|Ev).
  define(
      "append_to_cache(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, "
      "Tensor seqlens, *, Tensor? cu_seqlens=None, Tensor? block_table=None) -> ()");
  // Runs append_to_cache, then attention_forward over the caches. seqlens_k are the lengths with the new
  // keys. cu_seqlens_q says that key and value are packed, too.
  define(
      "attention_with_cache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, "
      "Tensor value, float scale, *, bool need_weights=False, " +
      options + ") -> (Tensor out, Tensor row_max, Tensor row_sum)");
  // The same with attention_statistics.
  define(
      "statistics_with_cache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, "
      "Tensor value, float scale, *, bool need_weights=False, " +
      options + ") -> (Tensor out, Tensor row_max, Tensor row_sum, Tensor row_top, Tensor row_mean)");
  define("attention_scores(Tensor query, Tensor key, float scale, *, str kernel_name=\"\") -> Tensor");
  define(
      "attention_scores_backward(Tensor grad_scores, Tensor query, Tensor key, float scale, *, "
      "str kernel_name=\"\") -> (Tensor grad_query, Tensor grad_key)");
  define(
      "masked_softmax(Tensor scores, float scale, *, Tensor? mask=None, bool is_causal=False, "
      "SymInt query_offset=0, str kernel_name=\"\") -> Tensor");
  define(
      "masked_softmax_backward(Tensor grad_weights, Tensor weights, float scale, *, "
      "str kernel_name=\"\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(SELFATTN_NAMESPACE, CPU, library) { selfattn::ops::implement_operators(library); }
