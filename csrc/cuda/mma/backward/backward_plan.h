// The plan of a backward launch: the call, and how its work is divided among blocks. Plain C++: the host
// fills it from shapes, strides and addresses alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../../core/attention_params.h"
#include "../../../core/integers.h"
#include "../../common/launch.h"

namespace selfattn::cuda::mma::backward {

constexpr int64_t kQueryPadding = 128;  // a multiple of the queries of any tile

// Numbers of every query. The queries of each sequence are padded, so that rows begin at multiples of 16
// bytes and whole tiles of them can be read. Queries beyond the last have a weight of 0 and a delta of 0.
struct Statistics {
  float* shift = nullptr;        // that of rows::RowGradients; in bare calls log2 of the sum of 2^score
  float* inverse_sum = nullptr;  // that of rows::RowGradients; +0 beyond the last query
  float* delta = nullptr;
  float* large_shift = nullptr;  // the shift of rows::RowGradients in bare calls: for rows of large scores
  int64_t queries = 0;  // padded queries of a head: those of one batch element, or of all packed ones

  // Where the numbers of a batch element's first head begin. `first_query` is where its queries begin, if
  // they are packed. Sequences that do not overlap have places that do not.
  SELFATTN_HOST_DEVICE int64_t first(const AttentionParams& p, int64_t batch, int64_t first_query) const {
    if (p.sequences.query_starts == nullptr) return batch * p.heads * queries;
    return (first_query / kQueryPadding + batch) * kQueryPadding;
  }
};

// Padded queries of a head, see Statistics.
inline int64_t padded_queries(const AttentionParams& p) {
  if (p.sequences.query_starts == nullptr) return round_up(p.queries, kQueryPadding);
  return (p.sequences.query_rows / kQueryPadding + p.batch) * kQueryPadding;
}

// Sides own tiles of rows of a unit: the queries of a head or the keys of a kv head.
struct Plan {
  BackwardArguments arguments;
  Statistics statistics;

  int64_t units = 0;
  int64_t row_tiles = 0;  // how many a unit has
  int64_t blocks = 0;

  float scale = 1.0f;
  float scale_log2 = 1.0f;     // scale * log2(e)
  float dropout_scale = 1.0f;  // a factor of kept weights
  int pieces = 1;              // how many a float32 number is split into, see pieces.cuh

  // Whether rows can be read and results written 16 bytes at a time, results written and masks read two
  // elements at a time.
  bool query_vectors = false;
  bool key_vectors = false;
  bool value_vectors = false;
  bool grad_out_vectors = false;
  bool grad_query_vectors = false;
  bool grad_key_vectors = false;
  bool grad_value_vectors = false;
  bool grad_query_pairs = false;
  bool grad_key_pairs = false;
  bool grad_value_pairs = false;
  bool mask_pairs = false;
  bool mask_chunks = false;

  AttentionParams params;  // last: see FunctionArguments in core/score_function.h
};

// Whether the bare kernels take a call: the forward's do, and no gradients of weights or slopes are wanted.
bool is_bare(const AttentionParams& params, const BackwardArguments& arguments);

// `rows`: of a tile; `owns_queries`: see BackwardKind.
Plan plan_side(const AttentionParams& params, const BackwardArguments& arguments,
               const Statistics& statistics, int64_t rows, bool owns_queries);

// The workspace begins with what rows::prepare() leaves and the statistics, a multiple of 256 bytes in all.
size_t statistics_bytes(const AttentionParams& params);
Statistics statistics_in(void* workspace, const AttentionParams& params);

// Starts the kernels that fill them, which come first in a backward call. `where` has the workspace.
Statistics prepare_statistics(const AttentionParams& params, const BackwardArguments& arguments,
                              const Launch& where);

// The kernels of a call that compute the gradients of queries, keys and values, with the statistics.
using Sides = void (*)(const AttentionParams&, const BackwardArguments&, const Statistics&, CUstream_st*);

}  // namespace selfattn::cuda::mma::backward
