// attention_captured_gradients: gradients of the tensors that the function of a call reads.
#include "attention_backward.h"
#include "engine.h"
#include "operators.h"

namespace selfattn::ops {

namespace {

// How many elements the tensor has; -1 if their number overflows.
int64_t count_of(const Input& input) {
  int64_t count = 1;
  for (int64_t d = 0; d < input.rank; ++d) {
    if (input.size[d] == 0) return 0;
  }
  for (int64_t d = 0; d < input.rank; ++d) {
    if (__builtin_mul_overflow(count, input.size[d], &count)) return -1;
  }
  return count;
}

int64_t checked_sum(const std::vector<int64_t>& sizes, const Options& options) {
  if (sizes.size() != options.captured.size()) {
    refuse("captured_sizes must be ", options.captured.size(), " numbers, one for each captured tensor, but ",
           "they are ", sizes.size());
  }
  int64_t sum = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t count = count_of(inspect("captured", options.captured[i]));
    if (sizes[i] != 0 && sizes[i] != count) {
      refuse("captured_sizes must be 0 or how many elements the tensor has, but for tensor ", i, " with ",
             count, " elements it is ", sizes[i]);
    }
    if (__builtin_add_overflow(sum, sizes[i], &sum)) {
      refuse("the captured tensors have more elements than memory can address");
    }
  }
  return sum;
}

}  // namespace

void attention_captured_gradients(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  BackwardTensors tensors(stack);
  tensors.row_max = stack.tensor();
  tensors.row_sum = stack.tensor();
  const double scale = stack.number();
  const std::vector<int64_t> sizes = stack.integers();
  const int64_t exclusive = stack.integer();
  tensors.out_residual = stack.optional_tensor();
  tensors.grad_row = stack.optional_tensor();
  tensors.grad_weights = stack.optional_tensor();
  const Options options(stack);

  const BackwardCall call(tensors, scale, options);
  const int64_t sum = checked_sum(sizes, options);
  const ScoreFunctionTable* table = call.params.function.table;
  // A function for a GPU needs no such check: its kernel then adds nothing.
  if (sum > 0 && table->device == nullptr && table->add_captured == nullptr) {
    refuse("score_function \"", options.score_function->text, "\" has no gradient of captured tensors");
  }
  if (exclusive < 0 || exclusive > 7) refuse("exclusive must lie between 0 and 7, but it is ", exclusive);
  Output sums = allocate("the captured tensors' gradients", {sum}, DType::kFloat64, call.query.device);
  sums.fill_zero();
  CapturedGradients gradients;
  gradients.sizes = sizes.data();
  gradients.count = static_cast<int64_t>(sizes.size());
  gradients.sums = static_cast<double*>(sums.data);
  gradients.exclusive_batch = (exclusive & 1) != 0;
  gradients.exclusive_head = (exclusive & 2) != 0;
  gradients.exclusive_query = (exclusive & 4) != 0;
  if (sum > 0) {
    engine_of(call.query.device)
        .captured_gradients(options.kernel_name.text, call.params, call.arguments, gradients,
                            call.query.device);
  }
  stack.put(sums.handle);
}

}  // namespace selfattn::ops
