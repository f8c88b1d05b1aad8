// The scaled dot product alone and its backward, by loops. S = scale · Q Kᵀ; dQ = scale · dS K, dK = scale ·
// dSᵀ Q.
#include <algorithm>
#include <vector>

#include "formula.h"
#include "loops.h"

namespace selfattn::cpu::loops {

namespace {

template <class T>
struct ScoresTask {
  const ScoresParams& p;

  using Scratch = NoScratch;

  void operator()(int64_t item, Scratch&) const {
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    const int64_t kv_head = h / (p.heads / p.kv_heads);
    for (int64_t j = 0; j < p.keys; ++j) {
      double dot = 0;
      for (int64_t e = 0; e < p.head_dim; ++e)
        dot += load<double>(p.query, b, h, i, e) * load<double>(p.key, b, kv_head, j, e);
      store<T>(p.scores, b, h, i, j, static_cast<T>(p.scale * dot));
    }
  }
};

struct RowScratch {
  std::vector<double> sum;
  template <class Task>
  explicit RowScratch(const Task& task) : sum(static_cast<size_t>(task.p.head_dim)) {}
};

template <class T>
struct GradQueryTask {
  const ScoresParams& p;

  using Scratch = RowScratch;

  void operator()(int64_t item, Scratch& scratch) const {
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    const int64_t kv_head = h / (p.heads / p.kv_heads);
    std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
    for (int64_t j = 0; j < p.keys; ++j) {
      const double grad = load<double>(p.scores, b, h, i, j);
      for (int64_t e = 0; e < p.head_dim; ++e) scratch.sum[e] += grad * load<double>(p.key, b, kv_head, j, e);
    }
    for (int64_t e = 0; e < p.head_dim; ++e) {
      store<T>(p.grad_query, b, h, i, e, static_cast<T>(p.scale * scratch.sum[e]));
    }
  }
};

template <class T>
struct GradKeyTask {
  const ScoresParams& p;

  using Scratch = RowScratch;

  void operator()(int64_t item, Scratch& scratch) const {
    const auto [b, kv_head, j] = RowIndex(item, p.kv_heads, p.keys);
    const int64_t group = p.heads / p.kv_heads;
    std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      for (int64_t i = 0; i < p.queries; ++i) {
        const double grad = load<double>(p.scores, b, h, i, j);
        for (int64_t e = 0; e < p.head_dim; ++e) scratch.sum[e] += grad * load<double>(p.query, b, h, i, e);
      }
    }
    for (int64_t e = 0; e < p.head_dim; ++e) {
      store<T>(p.grad_key, b, kv_head, j, e, static_cast<T>(p.scale * scratch.sum[e]));
    }
  }
};

}  // namespace

void scores(const ScoresParams& p, const ThreadPool& pool) { run_rows<ScoresTask>(pool, p); }
void scores_backward(const ScoresParams& p, const ThreadPool& pool) {
  run_rows<GradQueryTask>(pool, p);
  run_items<GradKeyTask>(p.batch * p.kv_heads * p.keys, pool, p);
}

}  // namespace selfattn::cpu::loops
