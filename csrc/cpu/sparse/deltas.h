// The deltas of all rows, which the backward of selected keys computes before it begins.
#pragma once

#include "../fused/backward_scratch.h"
#include "selected_calls.h"

namespace selfattn::cpu::SELFATTN_ISA {

// The deltas, and the sums of dQ if T is not the tensors' type. Rows are in the order of row statistics.
template <class P>
struct SelectedWorkspace {
  using T = Scalar<P>;

  T *deltas, *grad_query;

  SELFATTN_OUT_OF_LINE void allocate(const AttentionParams& p, Arena& arena) {
    const int64_t rows = (p.sequences.query_starts != nullptr ? 1 : p.batch) * p.heads * p.rows_per_head;
    deltas = arena.take<T>(rows);
    grad_query = p.dtype == dtype_of<T>() ? nullptr : arena.take<T>(rows * p.head_dim);
  }
  static SelectedWorkspace at(const AttentionParams& p, void* memory) {
    SelectedWorkspace workspace;
    Arena counted;
    workspace.allocate(p, counted);
    // The arena counted from 0.
    const auto first = reinterpret_cast<uintptr_t>(memory);
    workspace.deltas = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(workspace.deltas) + first);
    if (p.dtype != dtype_of<T>()) {
      workspace.grad_query = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(workspace.grad_query) + first);
    }
    return workspace;
  }
  // Returns what begins with a later row.
  SelectedWorkspace from(int64_t row, int64_t head_dim) const {
    return {deltas + row, grad_query == nullptr ? nullptr : grad_query + row * head_dim};
  }
};

// Computes the deltas of all rows, and the gradients of the sinks. An item is a strip of neighbouring
// queries.
template <class P>
struct DeltaTask {
  using T = Scalar<P>;

  const AttentionParams& p;
  const BackwardArguments& a;
  T* deltas;

  DeltaTask(const AttentionParams& params, const BackwardArguments& arguments, T* first)
      : p(params), a(arguments), deltas(first) {}
  int64_t strips() const { return divide_up(p.queries, kLanes<P>); }
  int64_t items() const { return p.batch * p.heads * strips(); }

  struct Parts {
    GradientStrip<P> strip;
    SELFATTN_OUT_OF_LINE void allocate(const DeltaTask& task, Arena& arena) { strip.allocate(task.p, arena); }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    s.lay_out(*this);
    const int64_t first = item % strips() * kLanes<P>, head = item / strips() % p.heads,
                  batch = item / strips() / p.heads;
    s.strip.begin_gradient(p, a, batch, head, first, smaller(kLanes<P>, p.queries - first));
    const int64_t row = s.strip.row(p);
    for (int64_t lane = 0; lane < s.strip.count; ++lane) {
      deltas[row + lane] = s.strip.delta[lane];
      if (a.grad_sinks_rows == nullptr) continue;
      static_cast<T*>(a.grad_sinks_rows)[row + lane] =
          sink_gradient(a, row + lane, head_scalar<T>(p.sinks, batch, head), s.strip.row_max[lane],
                        s.strip.inverse_sum[lane], s.strip.delta[lane]);
    }
  }
};

}  // namespace selfattn::cpu::SELFATTN_ISA
