// The gradients of queries, keys and values with selected keys.
//
// As in backward.cuh, a block owns rows of one side and adds up what their pairs give. Queries go through
// their list of keys; neighbouring keys go through the queries whose lists hold them, which the inverse lists
// name in ascending order, first those of one list, then those of the next.
#pragma once

#include <type_traits>

#include "backward.cuh"
#include "inverse_lists.h"
#include "selected_tile.cuh"

namespace selfattn::cuda::simt {

// The queries whose lists hold a block of keys, of all heads that share the lists. Columns of tiles are begin
// .. end - 1 of them.
struct ListedQueries {
  const int32_t* numbers;       // of rows of the selection
  int64_t query_size, queries;  // of a row, and of the sequence
  int64_t first_head, heads;
  int64_t begin, end;

  __device__ __forceinline__ TileLine line(int64_t index) const {
    if (index >= end) return {-1, 0};
    const int64_t of_row = query_size * heads, rest = index % of_row;
    const int64_t query = numbers[index / of_row] * query_size + rest % query_size;
    if (query >= queries) return {-1, 0};
    return {query, static_cast<int>(first_head + rest / query_size)};
  }
};

// A tile of neighbouring keys of a block.
template <class T>
struct KeyTile {
  Sequence sequence;
  int64_t head;  // the first query head that reads these keys
  int64_t block, first_key;
  int rows;   // there may be none
  int lists;  // of the heads that read them; they follow each other

  static SELFATTN_HOST_DEVICE int64_t tiles_of_block(const AttentionParams& p) {
    return divide_up(selfattn::smaller(p.selection.key_size, p.keys), kRows<T>);
  }
  // Tiles of sequences that are not the longest may have no rows.
  static SELFATTN_HOST_DEVICE int64_t count(const AttentionParams& p) {
    return p.batch * p.kv_heads * divide_up(p.keys, p.selection.key_size) * tiles_of_block(p);
  }

  __device__ __forceinline__ KeyTile(const AttentionParams& p, int64_t index) {
    const int64_t tiles = tiles_of_block(p), blocks = divide_up(p.keys, p.selection.key_size);
    const int64_t tile = index % tiles;
    index /= tiles;
    block = index % blocks;
    index /= blocks;
    const int64_t group = p.heads / p.kv_heads;
    sequence = sequence_of(p, index / p.kv_heads);
    head = index % p.kv_heads * group;
    first_key = block * p.selection.key_size + tile * kRows<T>;
    const int64_t end = selfattn::smaller(sequence.keys, (block + 1) * p.selection.key_size);
    rows = static_cast<int>(limited(end - first_key, 0, int64_t{kRows<T>}));
    lists = static_cast<int>(group / heads_together(p));
  }

  __device__ __forceinline__ TileLine line(int index) const {
    return {index < rows ? first_key + index : -1, 0};
  }

  // Leaves out rows of the selection from which the windows hide all keys.
  __device__ __forceinline__ ListedQueries listed_queries(const AttentionParams& p, const InverseLists& lists,
                                                          int list) const {
    const int64_t heads = heads_together(p), query_size = p.selection.query_size;
    const InverseOfHead inverse(lists, p, sequence.batch, head + list * heads);
    const int64_t begin = selfattn::smaller(inverse.starts[block], inverse.numbers),
                  end = selfattn::smaller(inverse.starts[block + 1], inverse.numbers);
    const int32_t* const numbers = inverse.rows + begin;
    const QueryRange seeing = visible_queries(positions_of(p, sequence), first_key, first_key + rows - 1);
    const int64_t first = first_from(numbers, end - begin, seeing.begin / query_size);
    const int64_t seen = first_from(numbers + first, end - begin - first, divide_up(seeing.end, query_size));
    return {numbers + first, query_size, sequence.queries, list * heads, heads, 0, seen * query_size * heads};
  }
};

// The columns of a tile.
template <class T>
__device__ __forceinline__ ListedKeys columns_of(const QueryTile<T>& tile, const AttentionParams& p,
                                                 const InverseLists&, int) {
  return tile.listed_keys(p);
}
template <class T>
__device__ __forceinline__ ListedQueries columns_of(const KeyTile<T>& tile, const AttentionParams& p,
                                                    const InverseLists& lists, int list) {
  return tile.listed_queries(p, lists, list);
}

// Turns the fragments of both products into W and ds in the panels, as weigh_tile does. `head` is the first
// head.
template <DType kDType, Side kSide, class T>
__device__ __forceinline__ void weigh_selected(const AttentionParams& p, const BackwardArguments& a,
                                               const rows::RowGradients<T>& rows, const Sequence& sequence,
                                               int64_t head, const SelectedShared<T>& shared,
                                               const Fragment<T>& s, const Fragment<T>& grads_of_weights) {
  constexpr bool kByKeys = kRowsAreKeys<kSide>;
  put_fragment<T>(shared.weights, s);
  put_fragment<T>(shared.score_grads, grads_of_weights);
  const SelectedScores<T> scores(p, sequence, head, shared.rows, shared.columns);
  const DropoutPattern<T> pattern(p.dropout, sequence.batch, head);
  const bool bare = scores.is_bare(), sum_slopes = !kByKeys && a.grad_slopes_rows != nullptr;

#pragma unroll 1
  for (int q = 0; q < (kByKeys ? kColumnsPerThread : kRowsPerThread<T>); ++q) {
    const int own = kByKeys ? fragment_column<T>(q) : fragment_row<T>(q);
    const TileLine query = (kByKeys ? shared.columns : shared.rows)[own];
    // A query that does not exist takes the numbers of another: the window shows it nothing.
    const int64_t first = first_statistic_of(p, sequence, head + query.head);
    const QueryNumbers<T> numbers(rows, first + (query.number < 0 ? 0 : query.number));
    DropoutOfQuery<T> dropout(pattern, query);
    T slope = T(0);
#pragma unroll 1
    for (int k = 0; k < (kByKeys ? kRowsPerThread<T> : kColumnsPerThread); ++k) {
      const int other = kByKeys ? fragment_row<T>(k) : fragment_column<T>(k);
      const TileLine key = (kByKeys ? shared.rows : shared.columns)[other];
      const int at = kByKeys ? panel_index<T, kRows<T>>(own, other) : panel_index<T, kRows<T>>(other, own);
      const T dot = shared.weights[at];
      T weight = -T(0), grad = -T(0);
      if (!numbers.is_dead() && scores.window_shows(query, key)) {
        const T keep = pattern.enabled() ? dropout.factor(key.number) : T(1);
        const T weight_grad = shared.score_grads[at] * keep;
        if (bare) {
          weight = numbers.weight(scores.scaled(dot));
          grad = numbers.score_grad(weight, weight_grad);
          weight *= keep;
        } else if (const ScoreTile<T> pair = scores.of(query, key); pair.mask_shows(0, 0)) {
          weight = numbers.weight(pair.score_in_window(0, 0, dot));
          grad = numbers.score_grad(weight, weight_grad);
          weight *= keep;
          if (sum_slopes) slope = multiply_add(grad, -pair.distance(0, 0), slope);
          if (p.softcap > 0.0) grad = grad * pair.softcap_slope(dot) + T(0);
        }
      }
      shared.weights[at] = weight;
      shared.score_grads[at] = grad;
    }
    if (sum_slopes) {
      slope = sum_of_row(slope);
      if (thread_column() == 0) shared.row_sums[own] += slope;
    }
  }
}

// The work of a block. It lies in shared memory behind the panels, so that it takes no registers.
template <DType kDType, Side kSide>
struct SelectedGradientPlan {
  using T = typename Element<kDType>::Accumulation;
  static constexpr bool kByKeys = kRowsAreKeys<kSide>;

  std::conditional_t<kByKeys, KeyTile<T>, QueryTile<T>> at;
  ListedRows<kDType> queries, grads, keys, values;

  __device__ __forceinline__ SelectedGradientPlan(const AttentionParams& p, const BackwardArguments& a,
                                                  int64_t tile, const SelectedShared<T>& shared)
      : at(p, tile),
        queries(queries_of(shared), p.query, at.sequence.query_batch, at.head, at.sequence.first_query),
        grads(queries_of(shared), a.grad_out, at.sequence.query_batch, at.head, at.sequence.first_query),
        keys(keys_of(shared), p.key, at.sequence.key_batch, p.kv_head(at.head), at.sequence.first_key),
        values(keys_of(shared), p.value, at.sequence.key_batch, p.kv_head(at.head), at.sequence.first_key) {}

 private:
  static __device__ __forceinline__ const TileLine* queries_of(const SelectedShared<T>& shared) {
    return kByKeys ? shared.columns : shared.rows;
  }
  static __device__ __forceinline__ const TileLine* keys_of(const SelectedShared<T>& shared) {
    return kByKeys ? shared.rows : shared.columns;
  }
};

template <DType kDType, Side kSide, class Plan = SelectedGradientPlan<kDType, kSide>>
constexpr size_t kSelectedGradientBytes = SelectedShared<typename Plan::T>::kBytes + sizeof(Plan);

template <DType kDType, Side kSide>
__global__ void __launch_bounds__(kThreads, 2)
    selected_gradient_kernel(const __grid_constant__ AttentionParams p,
                             const __grid_constant__ BackwardArguments a,
                             const rows::RowGradients<typename Element<kDType>::Accumulation> rows,
                             const InverseLists inverse, const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  constexpr bool kByKeys = kRowsAreKeys<kSide>;
  SELFATTN_DYNAMIC_SHARED(memory);
  const SelectedShared<T> shared(memory);
  const int64_t block = first_block + blockIdx.x, parts = GradientPanel<kSide>::parts(p);
  const int64_t first_panel = block % parts * kOutputPanels;
  using Plan = SelectedGradientPlan<kDType, kSide>;
  static_assert(SelectedShared<T>::kBytes % alignof(Plan) == 0, "the plan is aligned");
  auto& plan = *reinterpret_cast<Plan*>(memory + SelectedShared<T>::kBytes);
  if (threadIdx.x == 0) plan = Plan(p, a, block / parts, shared);
  __syncthreads();
  const auto& [at, queries, grads, keys, values] = plan;
  if (at.rows == 0) return;
  const Sequence& sequence = at.sequence;
  fill_lines<kRows<T>>(shared.rows, [&](int row) { return plan.at.line(row); });
  const bool sums_slopes = !kByKeys && a.grad_slopes_rows != nullptr;
  if (sums_slopes && threadIdx.x < kRows<T>) shared.row_sums[threadIdx.x] = T(0);
  __syncthreads();

  const bool has_rows = warp_has_rows<T>(at.rows);
  const bool needs_score_grads = !GradientPanel<kSide>(p, first_panel).of_values;
  Fragment<T> out[kOutputPanels];
#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) clear<T>(out[n]);

  int lists = 1;
  if constexpr (kByKeys) lists = at.lists;
#pragma unroll 1
  for (int list = 0; list < lists; ++list) {
    const auto listed = columns_of(at, p, inverse, list);
    for (int64_t first = listed.begin; first < listed.end; first += kColumns) {
      const int columns = smaller(listed.end - first, kColumns);
      __syncthreads();  // all threads have finished with the columns
      fill_lines<kColumns>(shared.columns, [&](int column) { return listed.line(first + column); });
      __syncthreads();
      Fragment<T> s, grad;
      multiply_listed<kDType>(shared, kByKeys ? keys : queries, at.rows, kByKeys ? queries : keys, columns,
                              p.head_dim, has_rows, s);
      multiply_listed<kDType>(shared, kByKeys ? values : grads, at.rows, kByKeys ? grads : values, columns,
                              needs_score_grads ? p.value_dim : 0, has_rows, grad);
      __syncthreads();  // ds replaces the rows of products
      if (has_rows) weigh_selected<kDType, kSide>(p, a, rows, sequence, at.head, shared, s, grad);
#pragma unroll
      for (int n = 0; n < kOutputPanels; ++n) {
        const GradientPanel<kSide> panel(p, first_panel + n);
        if (!panel.exists()) continue;
        add_weighted<kDType>(panel.of_values ? shared.weights : shared.score_grads, shared.column_panel,
                             RowRange{kByKeys ? (panel.of_values ? grads : queries) : keys, 0, columns},
                             panel.first_column, panel.columns, has_rows, out[n]);
      }
    }
  }

#pragma unroll
  for (int n = 0; n < kOutputPanels; ++n) {
    const GradientPanel<kSide> panel(p, first_panel + n);
    if (!panel.exists()) continue;
    // ds was the gradient of a score, so the gradient of q·k needs the scale.
    const T scale = panel.of_values ? T(1) : static_cast<T>(p.scale);
    for_each_number<T>([&](int r, int c) { out[n][r][c] *= scale; });
    const View& view = !kByKeys ? a.grad_query : panel.of_values ? a.grad_value : a.grad_key;
    const ListedTarget<kDType> target(
        shared.rows, view, nullptr, kByKeys ? sequence.key_batch : sequence.query_batch,
        kByKeys ? p.kv_head(at.head) : at.head, kByKeys ? sequence.first_key : sequence.first_query);
    store_fragment<T>(target, 0, at.rows, panel.first_column, panel.columns, out[n]);
  }
  if (!sums_slopes || first_panel != 0) return;
  __syncthreads();  // the sums of other threads' rows
  const int row = static_cast<int>(threadIdx.x);
  if (row >= at.rows) return;
  const TileLine query = shared.rows[row];
  const int64_t first = first_statistic_of(p, sequence, at.head + query.head);
  static_cast<T*>(a.grad_slopes_rows)[first + query.number] = shared.row_sums[row];
}

// `where.workspace` begins with the row gradients.
template <DType kDType>
void selected_backward(const AttentionParams& p, const BackwardArguments& a, const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const rows::RowGradients<T> rows = rows::row_gradients_in<T>(where.workspace, p);
  const InverseLists inverse =
      inverse_lists_in(static_cast<char*>(where.workspace) + rows::row_gradients_bytes(p), p);
  build_inverse_lists(p, inverse, where);
  launch_blocks(&selected_gradient_kernel<kDType, Side::kQuery>,
                QueryTiles<T>(p).count(p) * GradientPanel<Side::kQuery>::parts(p), kThreads,
                kSelectedGradientBytes<kDType, Side::kQuery>, where, p, a, rows, inverse);
  launch_blocks(&selected_gradient_kernel<kDType, Side::kKey>,
                KeyTile<T>::count(p) * GradientPanel<Side::kKey>::parts(p), kThreads,
                kSelectedGradientBytes<kDType, Side::kKey>, where, p, a, rows, inverse);
}

}  // namespace selfattn::cuda::simt
