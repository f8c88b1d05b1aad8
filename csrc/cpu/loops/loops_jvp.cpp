// Forward mode: the forward, then the tangents of each row from its statistics.
#include <vector>

#include "loops.h"
#include "score_tangent.h"

namespace selfattn::cpu::loops {

namespace {

template <class T>
struct JvpTask {
  RowTangent<T> row;
  const JvpArguments& a;

  struct Scratch {
    std::vector<double> out;
    explicit Scratch(const JvpTask& task) : out(static_cast<size_t>(task.row.tangent.formula.p.value_dim)) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const AttentionParams& p = row.tangent.formula.p;
    const auto [b, h, i] = RowIndex(item, p.heads, p.queries);
    const T mean = static_cast<const T*>(row.row_sum)[p.row(b, h, i)] == 0 ? T(0) : row.mean(b, h, i);
    row.store_out(b, h, i, mean, scratch.out.data(), a.tangent_out);
    static_cast<T*>(a.tangent_lse)[p.row(b, h, i)] = mean;
  }
};

template <class T>
void jvp_as(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool) {
  const RowTangent<T> row{{Formula<T>(p), a.tangents}, a.forward.row_max, a.forward.row_sum};
  for_each_item(pool, p.batch * p.heads * p.queries, JvpTask<T>{row, a});
}

}  // namespace

void jvp(const AttentionParams& p, const JvpArguments& a, const ThreadPool& pool) {
  forward(p, a.forward, pool);
  p.dtype == DType::kFloat64 ? jvp_as<double>(p, a, pool) : jvp_as<float>(p, a, pool);
}

}  // namespace selfattn::cpu::loops
