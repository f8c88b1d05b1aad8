// The gradients of tensors that a score function reads, in a separate pass. It computes dS again.
// core/captured_parts.h divides it into items.
#pragma once

#include "../../core/captured_parts.h"
#include "gradient_strip.h"
#include "function_block.h"

namespace selfattn::cpu::SELFATTN_ISA {

template <class P>
class CapturedGradientTask {
  using T = Scalar<P>;
  using Calls = std::vector<ElementCall<BackwardArguments>>;

 public:
  static constexpr int64_t kItems = 32;  // the wanted number, about

  CapturedGradientTask(const AttentionParams& params, const BackwardArguments& arguments,
                       const Calls* batch_elements, const CapturedGradients& gradients)
      : p(params),
        a(arguments),
        elements(batch_elements),
        g(gradients),
        parts(gradients, kItems, batches(), params.heads, most_strips()),
        copies(static_cast<size_t>((parts.copies - 1) * gradients.size())) {}

  int64_t items() const { return parts.items(); }

  struct Parts {
    static constexpr int64_t kStrips = 4;  // strips that meet a block of keys one after the other

    GradientScratch<P> block;
    GradientStrip<P> strips[kStrips];
    RowOperand<P> keys, values;
    double** sums;  // sums of each captured tensor

    SELFATTN_OUT_OF_LINE void allocate(const CapturedGradientTask& task, Arena& arena) {
      block.allocate(task.p, arena);
      for (GradientStrip<P>& strip : strips) strip.allocate(task.p, arena);
      keys.allocate(task.p, kKeyBlock, task.p.head_dim, arena);
      values.allocate(task.p, kKeyBlock, task.p.value_dim, arena);
      sums = arena.take<double*>(task.g.count);
    }
  };
  using Scratch = WorkerScratch<Parts, Session<P>>;

  void operator()(int64_t item, Scratch& s) const {
    const CapturedParts::Item part = parts.item(item);
    place_sums(s, part.copy);
    for (int64_t b = part.batches.first; b < part.batches.end; ++b) {
      const bool own = elements != nullptr;
      const AttentionParams& params = own ? (*elements)[static_cast<size_t>(b)].params : p;
      const BackwardArguments& arguments = own ? (*elements)[static_cast<size_t>(b)].results : a;
      const int64_t last = smaller(part.strips.end, divide_up(params.queries, kLanes<P>));
      for (int64_t head = part.heads.first; head < part.heads.end; ++head) {
        for (int64_t first = part.strips.first; first < last; first += Scratch::kStrips) {
          const int64_t end = smaller(first + Scratch::kStrips, last);
          add_strips(s, params, arguments, own ? 0 : b, head, first, end);
        }
      }
    }
  }

  // Adds the copies to the result, elements first .. end - 1.
  void join(int64_t first, int64_t end) const {
    const int64_t size = size_of_gradients();
    for (int64_t copy = 1; copy < parts.copies; ++copy) {
      const double* from = copies.data() + (copy - 1) * size;
      for (int64_t i = first; i < end; ++i) g.sums[i] += from[i];
    }
  }
  bool has_copies() const { return parts.copies > 1; }

  int64_t size_of_gradients() const { return g.size(); }

 private:
  const AttentionParams& p;
  const BackwardArguments& a;
  const Calls* elements;  // nullable; the calls of batch elements, instead of the batch
  const CapturedGradients& g;
  const CapturedParts parts;
  mutable std::vector<double> copies;  // all but the first, which is the result

  int64_t batches() const { return elements != nullptr ? static_cast<int64_t>(elements->size()) : p.batch; }
  int64_t most_strips() const {
    int64_t queries = elements == nullptr ? p.queries : 1;
    for (size_t i = 0; elements != nullptr && i < elements->size(); ++i) {
      queries = larger(queries, (*elements)[i].params.queries);
    }
    return divide_up(queries, kLanes<P>);
  }

  void place_sums(Scratch& s, int64_t copy) const {
    double* sums = copy == 0 ? g.sums : copies.data() + (copy - 1) * size_of_gradients();
    for (int64_t i = 0; i < g.count; ++i) {
      s.sums[i] = g.sizes[i] > 0 ? sums : nullptr;
      sums += g.sizes[i];
    }
  }

  // Adds what strips first .. end - 1 of a head contribute.
  static void add_strips(Scratch& s, const AttentionParams& p, const BackwardArguments& a, int64_t batch,
                         int64_t head, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const int64_t query = i * kLanes<P>;
      s.strips[i - first].begin_gradient(p, a, batch, head, query, smaller(p.queries - query, kLanes<P>));
    }
    const int64_t kv_head = p.kv_head(head);
    for (int64_t key = 0; key < p.keys; key += kKeyBlock) {
      const int64_t keys = smaller(p.keys - key, kKeyBlock);
      bool loaded = false;
      for (int64_t i = 0; i < end - first; ++i) {
        GradientStrip<P>& strip = s.strips[i];
        if (key >= strip.keys.end || key + keys <= strip.keys.begin) continue;
        if (!loaded) {
          s.keys.load(row_source(p.key, p.dtype, batch, kv_head, key, keys, p.head_dim));
          s.values.load(row_source(p.value, p.dtype, batch, kv_head, key, keys, p.value_dim));
          loaded = true;
        }
        const GradientBlock<P> block{key, keys, 0, &s.keys, &s.values};
        if (!grad_score_block<P>(p, a, strip, block, s.block, false)) continue;
        add_captured_gradients<P>(p.function, strip, key, keys, s.block.block.given, s.block.grad.block,
                                  s.sums);
      }
    }
  }
};

template <class P>
struct CapturedGradientJoin {
  static constexpr int64_t kElements = 65536;  // elements of an item

  const CapturedGradientTask<P>& task;

  struct Scratch {
    explicit Scratch(const CapturedGradientJoin&) {}
  };
  int64_t items() const { return task.has_copies() ? divide_up(task.size_of_gradients(), kElements) : 0; }
  void operator()(int64_t item, Scratch&) const {
    task.join(item * kElements, smaller((item + 1) * kElements, task.size_of_gradients()));
  }
};

template <class P>
void captured_gradients(const AttentionParams& p, const BackwardArguments& a, const CapturedGradients& g,
                        const ThreadPool& pool) {
  std::vector<ElementCall<BackwardArguments>> calls;
  const bool own = p.sequences.any();
  if (own) calls = element_calls(p, a, 1, kAnyQueries);
  if (own && calls.empty()) return;
  const CapturedGradientTask<P> task(p, a, own ? &calls : nullptr, g);
  for_each_item(pool, task.items(), task, Items::kIndependent);
  const CapturedGradientJoin<P> join{task};
  for_each_item(pool, join.items(), join, Items::kIndependent);
}

}  // namespace selfattn::cpu::SELFATTN_ISA
