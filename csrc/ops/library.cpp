// The schema of every op. The files named after the ops register their implementations.
//
// Rare options are keyword-only with defaults: a caller that leaves them out saves their conversion.
// Positions are SymInt, so that a compiled graph holds for every one of them: a decoder's offset grows with
// each token.
#include "stable.h"

// cu_seqlens_q (B+1,): query and what is shaped as it are packed, (1,H,rows,E), and so are row statistics,
// (1,H,rows); max_seqlen_q then stands for L. cu_seqlens_k (B+1,) and max_seqlen_k: the same for key and
// value. seqlens_k (B,): how many keys exist. query_offsets (B,): instead of query_offset. block_table
// (B,pages): key and value are pages, (N,Hk,page_size,E). All int64 but the table, int32; masks and weights
// are (B,H,L,S) whatever is packed.
//
// mask_shapes (3*B): attn_mask holds a mask for each packed sequence, one behind the other; these are heads,
// queries and keys of each, those of the sequence or 1.
//
// query (B,H,L,E), key (B,Hk,S,E), value (B,Hk,S,Ev), mask (B|1,H|1,L|1,S|1), slopes and sinks (B|1,H).
#define SELFATTN_OPTIONS                                                                     \
  "Tensor? attn_mask=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "                  \
  "Tensor? dropout_seed=None, float dropout_p=0., bool is_causal=False, "                    \
  "SymInt window_left=-1, SymInt window_right=-1, SymInt query_offset=0, float softcap=0., " \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, "            \
  "SymInt max_seqlen_k=0, Tensor? seqlens_k=None, Tensor? query_offsets=None, "              \
  "Tensor? block_table=None, SymInt[]? mask_shapes=None, "                                   \
  "str kernel_name=\"\", str float32_precision=\"highest\""

// need_weights: attention_weights will be called, so that the lack of memory for its result is an error now,
// before anything is computed or written.
STABLE_TORCH_LIBRARY(SELFATTN_NAMESPACE, library) {
  library.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, float scale, *, "
      "bool need_residual=False, bool need_weights=False, " SELFATTN_OPTIONS
      ") -> (Tensor out, Tensor row_max, Tensor row_sum, Tensor out_residual)");
  // For people: a line per CUDA kernel, best first, on why it does not take this call, empty where it does.
  library.def("attention_refusals(Tensor query, Tensor key, Tensor value, float scale, *, "  //
              SELFATTN_OPTIONS ") -> str");
  library.def(
      "attention_weights(Tensor query, Tensor key, Tensor row_max, Tensor row_sum, float scale, *, "  //
      SELFATTN_OPTIONS ") -> Tensor");
  library.def(
      "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor row_max, Tensor row_sum, float scale, *, "
      "Tensor? out_residual=None, Tensor? grad_row=None, Tensor? grad_weights=None, "
      "bool need_mask_grad=False, "  //
      SELFATTN_OPTIONS
      ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
      "Tensor grad_mask, Tensor grad_slopes, Tensor grad_sinks)");
  library.def(
      "plain_attention(Tensor query, Tensor key, Tensor value, float? scale, bool is_causal, bool "
      "enable_gqa) "
      "-> Tensor");
  library.def(
      "plain_attention_forward(Tensor query, Tensor key, Tensor value, float? scale, bool is_causal, "
      "bool enable_gqa) -> (Tensor out, Tensor statistics, Tensor out_residual)");
  library.def(
      "plain_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor statistics, Tensor? out_residual, float? scale, bool is_causal) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
  // Writes key and value (B,Hk,L,E|Ev) behind the seqlens (B,) rows of the caches, (B,Hk,S,E|Ev) or, with a
  // block_table, pages as above. cu_seqlens (B+1,): key and value are packed, (1,Hk,rows,E|Ev).
  library.def(
      "append_to_cache(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, "
      "Tensor seqlens, *, Tensor? cu_seqlens=None, Tensor? block_table=None) -> ()");
  // append_to_cache, then attention_forward over the caches. seqlens_k are the lengths with the new keys;
  // cu_seqlens_q packs key and value too.
  library.def(
      "attention_with_cache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, "
      "Tensor value, float scale, *, bool need_weights=False, "  //
      SELFATTN_OPTIONS ") -> (Tensor out, Tensor row_max, Tensor row_sum)");
  library.def("attention_scores(Tensor query, Tensor key, float scale, *, str kernel_name=\"\") -> Tensor");
  library.def(
      "attention_scores_backward(Tensor grad_scores, Tensor query, Tensor key, float scale, *, "
      "str kernel_name=\"\") -> (Tensor grad_query, Tensor grad_key)");
  library.def(
      "masked_softmax(Tensor scores, float scale, *, Tensor? mask=None, bool is_causal=False, "
      "SymInt query_offset=0, str kernel_name=\"\") -> Tensor");
  library.def(
      "masked_softmax_backward(Tensor grad_weights, Tensor weights, float scale, *, "
      "str kernel_name=\"\") -> Tensor");
}
