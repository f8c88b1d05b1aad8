// Attention with a window, forward and backward, beside the same by torch's own operations; and a step of a
// decoder.
#include <cmath>
#include <iostream>
#include <limits>

#include "operators.h"

namespace {

using at::Tensor;

// The largest difference of two tensors; infinite where it is no number.
double difference(const Tensor& a, const Tensor& b) {
  const double largest = (a - b).abs().max().item<double>();
  return std::isnan(largest) ? std::numeric_limits<double>::infinity() : largest;
}

// The same attention by the formula, with its matrix of scores: each query sees itself and `window` keys
// before it.
Tensor by_formula(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t window) {
  const int64_t group = query.size(1) / key.size(1);
  const Tensor scores = at::matmul(query, key.repeat_interleave(group, 1).transpose(-2, -1)) * scale;
  const Tensor seen = at::ones_like(scores, at::kBool).tril().triu(-window);
  const Tensor weights = at::softmax(scores.masked_fill(~seen, -std::numeric_limits<double>::infinity()), -1);
  return at::matmul(weights, value.repeat_interleave(group, 1));
}

std::vector<Tensor> gradients(const Tensor& out, const Tensor& grad_out, std::vector<Tensor> inputs) {
  for (Tensor& input : inputs) input.mutable_grad() = Tensor();
  out.backward(grad_out);
  for (Tensor& input : inputs) input = input.grad().clone();
  return inputs;
}

}  // namespace

int main() {
  at::manual_seed(0);
  const int64_t batch = 2, heads = 4, kv_heads = 2, length = 100, head_dim = 32, window = 16;
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  const Tensor query = at::randn({batch, heads, length, head_dim}).requires_grad_();
  const Tensor key = at::randn({batch, kv_heads, length, head_dim}).requires_grad_();
  const Tensor value = at::randn({batch, kv_heads, length, head_dim}).requires_grad_();
  const Tensor grad_out = at::randn(query.sizes());

  const Tensor out =
      selfattn_example::attention(query, key, value, scale, {{"is_causal", true}, {"window_left", window}});
  const Tensor expected = by_formula(query, key, value, scale, window);
  double largest = difference(out, expected);
  const auto ours = gradients(out, grad_out, {query, key, value});
  const auto theirs = gradients(expected, grad_out, {query, key, value});
  for (size_t i = 0; i < ours.size(); ++i) largest = std::max(largest, difference(ours[i], theirs[i]));
  std::cout << "forward and backward: within " << largest << " of the formula\n";

  // A step of a decoder: one new token for each of two sequences, behind 10 and 70 tokens of a cache for 100.
  const Tensor caches = at::randn({2, batch, kv_heads, length, head_dim});
  const Tensor before = at::tensor({10, 70}, at::kLong), steps = at::randn({3, batch, heads, 1, head_dim});
  const auto kv = steps.slice(2, 0, kv_heads);
  const Tensor step_out =
      selfattn_example::call("attention_with_cache", {steps[0], caches[0], caches[1], kv[1], kv[2], scale},
                             {{"seqlens_k", before + 1}, {"query_offsets", before}, {"is_causal", true}})[0]
          .toTensor();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t seen = before[b].item<int64_t>() + 1;
    const auto of = [&](const Tensor& cache) { return cache.slice(0, b, b + 1).slice(2, 0, seen); };
    const Tensor keys = of(caches[0]).repeat_interleave(heads / kv_heads, 1);
    const Tensor values = of(caches[1]).repeat_interleave(heads / kv_heads, 1);
    const Tensor weights =
        at::softmax(at::matmul(steps[0][b].unsqueeze(0), keys.transpose(-2, -1)) * scale, -1);
    largest = std::max(largest, difference(step_out[b].unsqueeze(0), at::matmul(weights, values)));
  }
  std::cout << "with a cache too: within " << largest << "\n";

  try {
    selfattn_example::attention(query, key, value.to(at::kDouble), scale);
  } catch (const std::exception& error) {
    std::cout << "refused: " << std::string(error.what()).substr(0, 200) << "\n";
  }
  return largest < 1e-5 ? 0 : 1;
}
