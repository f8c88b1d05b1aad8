// Turns the backward's sums into gradients: scaled, and rounded once.
#pragma once

#include "../products/arena.h"
#include "../products/operands.h"
#include "../products/tensor_rows.h"

namespace selfattn::cpu::SELFATTN_ISA {

// Stores rows first .. first + rows - 1 of a gradient.
template <class T>
void store_sums(const View& view, DType dtype, int64_t batch, int64_t head, int64_t first, int64_t rows,
                int64_t columns, const Rows<T>& sums, T factor) {
  using S = Simd<T>;
  for (int64_t row = 0; row < rows; ++row) {
    void* to = element(view.data, dtype, view.offset(batch, head, first + row));
    for (int64_t e = 0; e < columns; e += S::kWidth) {
      const auto sum = load_row<T>(sums.data + row * sums.stride + e, dtype_of<T>(), columns - e);
      store_row<T>(element(to, dtype, e), dtype, columns - e, S::mul(sum, S::set(factor)));
    }
  }
}

// The sums of dQ of a strip, gathered from one chunk of keys after another: in the gradient itself if that
// holds T, in the workspace otherwise. An only chunk needs neither.
template <class P>
struct QuerySums {
  using T = Scalar<P>;

  T* scale;       // [kLanes]
  T* transposed;  // [kLanes][padded head_dim]

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    scale = arena.take_filled<T>(kLanes<P>, static_cast<T>(p.scale));
    transposed = arena.take<T>(kLanes<P> * round_up_to_vector<T>(p.head_dim));
  }

  // Adds a chunk's contribution, [head_dim][kLanes], for queries first .. first + count - 1.
  void publish(const AttentionParams& p, const BackwardArguments& a, int64_t batch, int64_t head,
               int64_t first, int64_t count, bool first_chunk, bool last_chunk, const T* grad_query_t) const {
    const View& g = a.grad_query;
    void* result = element(g.data, p.dtype, g.offset(batch, head, first));
    const bool through_workspace = a.workspace != nullptr;
    if (!through_workspace && first_chunk && last_chunk) {
      store_transposed<T>(result, p.dtype, g.stride[2], count, p.head_dim, grad_query_t, kLanes<P>, scale);
      return;
    }
    T* sum = static_cast<T*>(result);
    int64_t stride = g.stride[2];
    if (through_workspace) {
      sum = static_cast<T*>(a.workspace) + ((batch * p.heads + head) * p.queries + first) * p.head_dim;
      stride = p.head_dim;
    }
    if (first_chunk) {
      store_transposed<T>(sum, dtype_of<T>(), stride, count, p.head_dim, grad_query_t, kLanes<P>, scale);
    } else {
      const int64_t padded = round_up_to_vector<T>(p.head_dim);
      store_transposed<T>(transposed, dtype_of<T>(), padded, count, p.head_dim, grad_query_t, kLanes<P>,
                          scale);
      for (int64_t row = 0; row < count; ++row) {
        for (int64_t e = 0; e < p.head_dim; ++e) sum[row * stride + e] += transposed[row * padded + e];
      }
    }
    if (last_chunk && through_workspace) {
      store_sums<T>(g, p.dtype, batch, head, first, count, p.head_dim, {sum, stride}, T(1));
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
