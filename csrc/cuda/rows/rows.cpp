// Chooses the kernels of a dtype, and lays out the arrays of row gradients in memory.
#include "rows.h"

#include "../../core/sequences.h"
#include "../common/call_for_dtype.h"
#include "rows_of_dtype.h"

namespace selfattn::cuda::rows {

namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

size_t row_array_bytes(const AttentionParams& p) {
  const int64_t size = size_of(statistics_dtype(p.dtype));
  const int64_t rows = p.row(p.sequences.query_starts != nullptr ? 1 : p.batch, 0, 0);
  return static_cast<size_t>(round_up(rows * size, kAlignment));
}

size_t row_gradients_bytes(const AttentionParams& p) { return 3 * row_array_bytes(p); }

template <class T>
RowGradients<T> row_gradients_in(void* memory, const AttentionParams& p) {
  const size_t bytes = row_array_bytes(p);
  char* const first = static_cast<char*>(memory);
  return {reinterpret_cast<T*>(first), reinterpret_cast<T*>(first + bytes),
          reinterpret_cast<T*>(first + 2 * bytes)};
}

template RowGradients<float> row_gradients_in<float>(void*, const AttentionParams&);
template RowGradients<double> row_gradients_in<double>(void*, const AttentionParams&);

void prepare(const AttentionParams& p, const BackwardArguments& a, void* memory, const Launch& where) {
  call_for_dtype(p.dtype, [&](auto dtype) { prepare_of_dtype<dtype>(p, a, memory, where); });
}

void sum_of_rows(const AttentionParams& p, const void* rows, void* sums, bool shared_by_batch,
                 const Launch& where) {
  if (p.dtype == DType::kFloat64) {
    sum_of_rows_as(p, static_cast<const double*>(rows), static_cast<double*>(sums), shared_by_batch, where);
  } else {
    sum_of_rows_as(p, static_cast<const float*>(rows), static_cast<float*>(sums), shared_by_batch, where);
  }
}

}  // namespace selfattn::cuda::rows
