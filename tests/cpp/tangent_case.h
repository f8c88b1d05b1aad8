// Derivatives of a kernel in a direction, on plain memory: forward mode and second derivatives. The
// differences of the loops judge them.
#pragma once

#include "attention_case.h"
#include "core/tangents.h"
#include "cpu/loops/loops.h"

namespace selfattn::test {

// An AttentionCase with a tangent for each input. Tangents of what the mask hides are NaN.
struct TangentCase : AttentionCase {
  Buffer tangent_query, tangent_key, tangent_value, tangent_mask, tangent_slopes, tangent_sinks;
  unsigned given;  // bit n says whether the n-th tangent is given

  TangentCase(DType type, const Shape& s, const Options& o, unsigned which, bool heads_inside = false)
      : AttentionCase(type, s, o, heads_inside),
        tangent_query(query),
        tangent_key(key),
        tangent_value(value),
        tangent_mask(mask),
        tangent_slopes(slopes),
        tangent_sinks(sinks),
        given(which) {
    Random random(29);
    for (Buffer* buffer : tangents()) random.fill(*buffer);
    for (int64_t n = 0; n < mask.count(); ++n) {
      if (std::isinf(mask.get(n))) tangent_mask.set(n, NAN);
    }
  }

  TangentCase in_float64() const {
    TangentCase wide(DType::kFloat64, shape, options, given);
    static_cast<AttentionCase&>(wide) = AttentionCase::in_float64();
    TangentCase from = *this;
    for (size_t b = 0; b < 6; ++b) {
      for (int64_t n = 0; n < from.tangents()[b]->count(); ++n) {
        wide.tangents()[b]->set(n, from.tangents()[b]->get(n));
      }
    }
    return wide;
  }

  std::vector<Buffer*> inputs() { return {&query, &key, &value, &mask, &slopes, &sinks}; }
  std::vector<Buffer*> tangents() {
    return {&tangent_query, &tangent_key, &tangent_value, &tangent_mask, &tangent_slopes, &tangent_sinks};
  }
  bool has(size_t tangent) const {
    const bool of_options[] = {true,           true,         true, options.mask && !options.boolean_mask,
                               options.slopes, options.sinks};
    return (given >> tangent & 1) != 0 && of_options[tangent];
  }

  Tangents direction() {
    Tangents t;
    if (has(0)) t.query = tangent_query.view();
    if (has(1)) t.key = tangent_key.view();
    if (has(2)) t.value = tangent_value.view();
    if (has(3)) t.mask = tangent_mask.broadcast_view();
    if (has(4)) t.alibi_slopes = {tangent_slopes.data(), 0, 1};
    if (has(5)) t.sinks = {tangent_sinks.data(), shape.heads, 1};
    return t;
  }
};

// What forward mode and second derivatives of one kernel write.
struct TangentResults {
  Buffer out, out_residual, row_max, row_sum, tangent_out, tangent_lse;
  Buffer grad_query, grad_key, grad_value, grad_mask, grad_slopes_rows, grad_sinks_rows;
  Buffer tangent_out_again, tangent_lse_again;  // from the second derivatives

  explicit TangentResults(const TangentCase& c)
      : out(c.grad_out.filled(NAN)),
        out_residual(out),
        row_max(Buffer(AttentionCase::accumulation(c.dtype), c.grad_row.size()).filled(NAN)),
        row_sum(row_max),
        tangent_out(out),
        tangent_lse(row_max),
        grad_query(c.query.filled(NAN)),
        grad_key(c.key.filled(NAN)),
        grad_value(c.value.filled(NAN)),
        grad_mask(c.mask.filled(0)),
        grad_slopes_rows(row_max),
        grad_sinks_rows(row_max),
        tangent_out_again(out),
        tangent_lse_again(row_max) {}

  TangentResults(const cpu::Kernel& kernel, TangentCase& c, const cpu::ThreadPool& pool) : TangentResults(c) {
    const AttentionParams p = c.params();
    const bool rounded = size_of(c.dtype) == 2;
    JvpArguments jvp;
    jvp.tangents = c.direction();
    jvp.forward = {out.view(), row_max.data(), row_sum.data(), rounded ? out_residual.data() : nullptr};
    jvp.tangent_out = tangent_out.view();
    jvp.tangent_lse = tangent_lse.data();
    kernel.jvp(p, jvp, pool);

    BackwardBackwardArguments second;
    second.tangents = c.direction();
    second.tangent_out = tangent_out_again.view();
    second.tangent_lse = tangent_lse_again.data();
    BackwardArguments& a = second.backward;
    a.grad_out = c.grad_out.view();
    a.out = out.view();
    if (rounded) a.out_residual = out_residual.view();
    a.row_max = row_max.data();
    a.row_sum = row_sum.data();
    a.grad_row = c.grad_row.data();
    a.grad_query = grad_query.view();
    a.grad_key = grad_key.view();
    a.grad_value = grad_value.view();
    if (c.options.mask && !c.options.boolean_mask) a.grad_mask = grad_mask.broadcast_view();
    if (c.options.slopes) a.grad_slopes_rows = grad_slopes_rows.data();
    if (c.options.sinks) a.grad_sinks_rows = grad_sinks_rows.data();
    const Workspace workspace(kernel.backward_backward_workspace(p));
    a.workspace = workspace.data();
    kernel.backward_backward(p, second, pool);
  }

  // Returns those that the options ask for, without the row statistics, with their names.
  std::vector<std::pair<const char*, const Buffer*>> all(const Options& options) const {
    std::vector<std::pair<const char*, const Buffer*>> list = {{"out", &out},
                                                               {"tangent_out", &tangent_out},
                                                               {"tangent_lse", &tangent_lse},
                                                               {"tangent_out again", &tangent_out_again},
                                                               {"tangent_lse again", &tangent_lse_again},
                                                               {"grad_query", &grad_query},
                                                               {"grad_key", &grad_key},
                                                               {"grad_value", &grad_value}};
    if (options.mask && !options.boolean_mask) list.push_back({"grad_mask", &grad_mask});
    if (options.slopes) list.push_back({"grad_slopes_rows", &grad_slopes_rows});
    if (options.sinks) list.push_back({"grad_sinks_rows", &grad_sinks_rows});
    return list;
  }
};

// The largest error of the differences of by_differences.
constexpr double kDifferenceLimit = 1e-7;

// Computes the same results in float64 by the loops, which have neither of these: forward mode is the
// difference of their forward along the tangents, and second derivatives are that of their backward, by the
// symmetry of second derivatives (Note [Second derivatives] in core/tangents.h).
inline TangentResults by_differences(TangentCase& c, const cpu::ThreadPool& pool) {
  constexpr double kStep = 1e-5;
  const auto moved = [&c](double step) {
    TangentCase there = c;
    there.options.grad_weights = false;
    for (size_t b = 0; b < 6; ++b) {
      if (!c.has(b)) continue;
      Buffer& input = *there.inputs()[b];
      for (int64_t n = 0; n < input.count(); ++n) {
        if (std::isfinite(input.get(n))) input.set(n, input.get(n) + step * c.tangents()[b]->get(n));
      }
    }
    return there;
  };
  TangentCase at = moved(0), ahead = moved(kStep), behind = moved(-kStep);
  const AttentionResults here(cpu::kLoops, at, pool), there(cpu::kLoops, ahead, pool),
      back(cpu::kLoops, behind, pool);
  TangentResults r(c);
  r.out = here.out;
  r.row_max = here.row_max;
  r.row_sum = here.row_sum;
  const auto differ = [](Buffer& result, const Buffer& more, const Buffer& less) {
    for (int64_t n = 0; n < result.count(); ++n) result.set(n, (more.get(n) - less.get(n)) / (2 * kStep));
  };
  differ(r.tangent_out, there.out, back.out);
  differ(r.grad_query, there.grad_query, back.grad_query);
  differ(r.grad_key, there.grad_key, back.grad_key);
  differ(r.grad_value, there.grad_value, back.grad_value);
  differ(r.grad_mask, there.grad_mask, back.grad_mask);
  differ(r.grad_slopes_rows, there.grad_slopes_rows, back.grad_slopes_rows);
  differ(r.grad_sinks_rows, there.grad_sinks_rows, back.grad_sinks_rows);
  const auto lse = [](const AttentionResults& results, int64_t n) {
    return results.row_max.get(n) + std::log(results.row_sum.get(n));
  };
  for (int64_t n = 0; n < r.row_max.count(); ++n) {
    const bool dead = here.row_sum.get(n) == 0;
    r.tangent_lse.set(n, dead ? 0 : (lse(there, n) - lse(back, n)) / (2 * kStep));
  }
  r.tangent_out_again = r.tangent_out;
  r.tangent_lse_again = r.tangent_lse;
  return r;
}

}  // namespace selfattn::test
