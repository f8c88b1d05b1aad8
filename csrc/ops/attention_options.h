// The options that the attention operators share: their names, types and defaults.
//
// Options::each is the list. The schema's text, the reading of arguments off the dispatcher's stack and their
// defaults all come from it, so that they cannot disagree. csrc/core/options.h says which options a kernel
// applies.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../core/attention_params.h"
#include "boxing.h"

namespace selfattn::ops {

// query is (B,H,L,E), key (B,Hk,S,E), value (B,Hk,S,Ev). Indices are int64, except that block_table is int32.
struct Options {
  TensorHandle attn_mask;     // (B|1,H|1,L|1,S|1), also for packed sequences; or see mask_shapes
  TensorHandle alibi_slopes;  // (B|1,H); so are the sinks
  TensorHandle sinks;
  TensorHandle dropout_seed;
  double dropout_p = 0.0;
  bool is_causal = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t query_offset = 0;
  double softcap = 0.0;
  // (B+1,): query and tensors of its shape are packed, (1,H,rows,E), and so are row statistics, (1,H,rows).
  // max_seqlen_q then stands for L. cu_seqlens_k and max_seqlen_k do the same for key and value.
  TensorHandle cu_seqlens_q;
  TensorHandle cu_seqlens_k;
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  TensorHandle seqlens_k;      // (B,): how many keys exist
  TensorHandle query_offsets;  // (B,): instead of query_offset
  TensorHandle block_table;    // (B,pages): key and value are pages, (N,Hk,page_size,E)
  // (3*B): attn_mask holds a mask for each packed sequence, end to end. These are the heads, queries and keys
  // of each mask, as many as the sequence has or 1.
  std::optional<std::vector<int64_t>> mask_shapes;
  // A function that load_score_function() has loaded, the tensors and numbers that it reads, and the map of
  // the blocks of scores that are visible: core/score_function.h.
  std::optional<Name> score_function;
  std::vector<TensorHandle> captured;
  std::optional<std::vector<double>> captured_numbers;
  TensorHandle block_map;                          // (B|1,H|1,query blocks,key blocks), uint8
  std::optional<std::vector<int64_t>> block_size;  // queries and keys of a block
  // (B|1,1|Hk|H,rows,K), int32: the lists of core/selection.h, of packed queries (1,1|Hk|H,rows,K).
  // selection_size holds the queries of a row and the keys of a block.
  TensorHandle selection;
  std::optional<std::vector<int64_t>> selection_size;
  Name kernel_name;
  Name float32_precision = {"highest"};
  bool batch_invariant = false;

  // (2,B+1), of the packed basic operators: cu_seqlens_q and cu_seqlens_k. Tensors and results that are
  // packed are then as users have them, (rows,H,E), except row statistics.
  TensorHandle offsets;

  // Used to describe the call to a kernel.
  std::vector<OwnMask> own_masks;                // those of mask_shapes
  std::vector<CapturedTensor> captured_tensors;  // those of captured
  mutable int32_t out_of_range = 0;              // set while kernels run

  Options() = default;
  // Takes all of them off the stack.
  explicit Options(Stack& stack);

  // Calls visit(name, field) for each of them, in the order of the schema.
  template <class Self, class Visit>
  static void each(Self& options, const Visit& visit) {
    visit("attn_mask", options.attn_mask);
    visit("alibi_slopes", options.alibi_slopes);
    visit("sinks", options.sinks);
    visit("dropout_seed", options.dropout_seed);
    visit("dropout_p", options.dropout_p);
    visit("is_causal", options.is_causal);
    visit("window_left", options.window_left);
    visit("window_right", options.window_right);
    visit("query_offset", options.query_offset);
    visit("softcap", options.softcap);
    visit("cu_seqlens_q", options.cu_seqlens_q);
    visit("cu_seqlens_k", options.cu_seqlens_k);
    visit("max_seqlen_q", options.max_seqlen_q);
    visit("max_seqlen_k", options.max_seqlen_k);
    visit("seqlens_k", options.seqlens_k);
    visit("query_offsets", options.query_offsets);
    visit("block_table", options.block_table);
    visit("mask_shapes", options.mask_shapes);
    visit("score_function", options.score_function);
    visit("captured", options.captured);
    visit("captured_numbers", options.captured_numbers);
    visit("block_map", options.block_map);
    visit("block_size", options.block_size);
    visit("selection", options.selection);
    visit("selection_size", options.selection_size);
    visit("kernel_name", options.kernel_name);
    visit("float32_precision", options.float32_precision);
    visit("batch_invariant", options.batch_invariant);
  }

  // "Tensor? attn_mask=None, ...". Positions are SymInt, so that a compiled graph is valid for all of them: a
  // decoder's offset grows with each token.
  static std::string schema();

  // Whether batch elements have lengths or places of their own.
  bool has_lengths() const {
    return offsets || cu_seqlens_q || cu_seqlens_k || seqlens_k || query_offsets || block_table;
  }
};

}  // namespace selfattn::ops
