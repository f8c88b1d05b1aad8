// attention_backward: the gradients of attention_forward and of attention_weights in one call.
#include <memory>

#include "attention_arguments.h"
#include "run_kernel.h"

namespace selfattn::ops {

namespace {

constexpr std::align_val_t kWorkspaceAlignment{64};

struct FreeWorkspace {
  void operator()(void* workspace) const { ::operator delete(workspace, kWorkspaceAlignment); }
};
using Workspace = std::unique_ptr<void, FreeWorkspace>;

Workspace allocate_workspace(size_t bytes) {
  if (bytes == 0) return nullptr;
  try {
    return Workspace(::operator new(bytes, kWorkspaceAlignment));
  } catch (const std::bad_alloc&) {
    throw AllocationFailure("not enough memory for the backward's workspace (" + std::to_string(bytes) +
                            " bytes)");
  }
}

// rows (batch, heads, queries) summed over the queries, and over the batch where the coefficient was shared.
// Serial and in double, so that the result depends on nothing but the rows.
template <class T>
void reduce_rows(const T* rows, T* sums, bool shared_by_batch, const AttentionParams& p) {
  for (int64_t b = 0; b < (shared_by_batch ? 1 : p.batch); ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      double sum = 0.0;
      for (int64_t source = b; source < (shared_by_batch ? p.batch : b + 1); ++source) {
        const T* row = rows + (source * p.heads + h) * p.queries;
        for (int64_t i = 0; i < p.queries; ++i) sum += static_cast<double>(row[i]);
      }
      sums[b * p.heads + h] = static_cast<T>(sum);
    }
  }
}

Output head_gradient(const char* name, const TensorHandle& coefficients, const Output& rows,
                     const AttentionParams& p) {
  const DType dtype = accumulation_dtype(p.dtype);
  if (!coefficients) return allocate_nothing(dtype);
  const Input input = inspect(name, coefficients);
  Output sums = allocate(name, {input.size[0], input.size[1]}, dtype);
  const bool shared_by_batch = input.size[0] == 1;
  if (dtype == DType::kFloat64) {
    reduce_rows(static_cast<const double*>(rows.data), static_cast<double*>(sums.data), shared_by_batch, p);
  } else {
    reduce_rows(static_cast<const float*>(rows.data), static_cast<float*>(sums.data), shared_by_batch, p);
  }
  return sums;
}

// Of the mask's own shape. The view has stride 0 along the dimensions that the kernel sums over.
Output mask_gradient(const TensorHandle& mask_handle, bool needed, const AttentionParams& p, View* view) {
  if (!needed) return allocate_nothing(p.dtype);
  if (!mask_handle) refuse("need_mask_grad was given without attn_mask");
  if (p.mask.dtype == DType::kBool) refuse("a boolean attn_mask has no gradient");
  const Input mask = inspect("attn_mask", mask_handle);
  Output grad_mask =
      allocate("grad_mask", {mask.size[0], mask.size[1], mask.size[2], mask.size[3]}, p.mask.dtype);
  *view = grad_mask.view(p.mask.dtype);
  for (int d = 0; d < kMaxRank; ++d) {
    if (mask.size[d] == 1) view->stride[d] = 0;
  }
  // A kernel may pass over tiles that nobody sees.
  grad_mask.fill_zero();
  return grad_mask;
}

void attention_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  TensorHandle grad_out_handle = stack.tensor();
  const TensorHandle query_handle = stack.tensor();
  const TensorHandle key_handle = stack.tensor();
  const TensorHandle value_handle = stack.tensor();
  TensorHandle out_handle = stack.tensor();
  TensorHandle row_max_handle = stack.tensor();
  TensorHandle row_sum_handle = stack.tensor();
  const double scale = stack.number();
  TensorHandle residual_handle = stack.optional_tensor();
  TensorHandle grad_row_handle = stack.optional_tensor();
  const TensorHandle grad_weights_handle = stack.optional_tensor();
  const bool need_mask_grad = stack.flag();
  const Options options(stack);

  const Input query = inspect("query", query_handle);
  const Input key = inspect("key", key_handle);
  const Input value = inspect("value", value_handle);
  const AttentionParams p = attention_params(query, key, &value, scale, options);
  const cpu::Kernel& kernel = cpu::choose_kernel(options.kernel.text);

  BackwardArguments a;
  const auto output_like = [&](const char* name, TensorHandle& handle) {
    Input input = inspect(name, handle);
    check_shape(input, {p.batch, p.heads, p.queries, p.value_dim});
    check_dtype(input, p.dtype);
    if (!has_unit_last_stride(input)) make_contiguous(handle, input);
    return plain_view(input, p.dtype);
  };
  const auto statistics = [&](const char* name, TensorHandle& handle) {
    Input input = inspect(name, handle);
    return row_statistics(handle, input, p);
  };
  a.grad_out = output_like("grad_out", grad_out_handle);
  a.out = output_like("out", out_handle);
  if (residual_handle) a.out_residual = output_like("out_residual", residual_handle);
  a.row_max = statistics("row_max", row_max_handle);
  a.row_sum = statistics("row_sum", row_sum_handle);
  if (grad_row_handle) a.grad_row = statistics("grad_row", grad_row_handle);
  if (grad_weights_handle) {
    const Input grad_weights = inspect("grad_weights", grad_weights_handle);
    check_shape(grad_weights, {p.batch, p.heads, p.queries, p.keys});
    check_dtype(grad_weights, p.dtype);
    a.grad_weights = plain_view(grad_weights, p.dtype);
  }

  Output grad_mask = mask_gradient(options.attn_mask, need_mask_grad, p, &a.grad_mask);
  Output grad_query = allocate_like("grad_query", {p.batch, p.heads, p.queries, p.head_dim}, p.dtype, query);
  Output grad_key = allocate_like("grad_key", {p.batch, p.kv_heads, p.keys, p.head_dim}, p.dtype, key);
  Output grad_value = allocate_like("grad_value", {p.batch, p.kv_heads, p.keys, p.value_dim}, p.dtype, value);
  const DType accumulation = accumulation_dtype(p.dtype);
  Output slopes_rows, sinks_rows;
  if (options.alibi_slopes) {
    slopes_rows = allocate("the slopes' row gradients", {p.batch, p.heads, p.queries}, accumulation);
  }
  if (options.sinks)
    sinks_rows = allocate("the sinks' row gradients", {p.batch, p.heads, p.queries}, accumulation);

  if (p.batch == 0 || p.heads == 0 || p.queries == 0) {
    grad_key.fill_zero();
    grad_value.fill_zero();
  } else {
    a.grad_query = grad_query.view(p.dtype);
    a.grad_key = grad_key.view(p.dtype);
    a.grad_value = grad_value.view(p.dtype);
    a.grad_slopes_rows = slopes_rows.data;
    a.grad_sinks_rows = sinks_rows.data;
    const Workspace workspace = allocate_workspace(kernel.backward_workspace(p));
    a.workspace = workspace.get();
    run_kernel(kernel.backward, p, a);
  }
  Output grad_slopes = head_gradient("grad_slopes", options.alibi_slopes, slopes_rows, p);
  Output grad_sinks = head_gradient("grad_sinks", options.sinks, sinks_rows, p);
  stack.put(grad_query.handle, grad_key.handle, grad_value.handle, grad_mask.handle, grad_slopes.handle,
            grad_sinks.handle);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SELFATTN_NAMESPACE, CPU, library) {
  library.impl("attention_backward", &attention_backward);
}

}  // namespace selfattn::ops
