// Attention with no option but a mask and the causal rule, for eager calls on small tensors.
//
// These operators are attention_forward and attention_backward with few arguments, and one of them returns
// out alone. A call on small tensors takes a few microseconds, most of them outside the kernel: each argument
// that is no tensor costs 0.1 of them, given or not, and each result costs an allocation. So basic_attention
// and causal_attention take tensors alone, and masked_attention takes everything.
// packed_attention takes packed sequences as users have them, as views and copies cost more in Python.
#include <algorithm>
#include <cmath>
#include <utility>

#include "attention_backward.h"
#include "attention_forward.h"
#include "operators.h"

namespace selfattn::ops {

namespace {

// The default is 1 / sqrt(head_dim), in the same arithmetic as Python's head_dim ** -0.5.
double scale_or_default(std::optional<double> scale, const TensorHandle& query_handle) {
  if (scale) return *scale;
  const Input query = inspect("query", query_handle);
  const int64_t head_dim = query.rank > 0 ? query.size[query.rank - 1] : 0;
  return head_dim > 0 ? std::pow(static_cast<double>(head_dim), -0.5) : 1.0;
}

// Returns a mask with four dimensions. The first ones may be missing, as the public functions allow it, and a
// view costs less here than in Python.
TensorHandle four_dimensional(TensorHandle mask) {
  int64_t rank = kMaxRank;
  if (mask) aoti_torch_get_dim(mask.get(), &rank);
  if (rank >= kMaxRank) return mask;
  const Input given = inspect("attn_mask", mask);
  int64_t size[kMaxRank] = {1, 1, 1, 1}, stride[kMaxRank] = {0, 0, 0, 0};
  std::copy_n(given.size, rank, size + kMaxRank - rank);
  std::copy_n(given.stride, rank, stride + kMaxRank - rank);
  AtenTensorHandle view = nullptr;
  // The last number is added to the offset of the mask in its storage.
  if (aoti_torch__reinterpret_tensor(mask.get(), kMaxRank, size, stride, 0, &view) != TORCH_SUCCESS) {
    throw AllocationFailure("not enough memory for a view of attn_mask");
  }
  return TensorHandle(view);
}

// Returns a new tensor (2, B + 1) of int64 with the offsets of queries and of keys.
TensorHandle joined_offsets(const TensorHandle& queries, const TensorHandle& keys) {
  const Input both[] = {inspect("cu_seqlens_q", queries), inspect("cu_seqlens_k", keys)};
  const DTypeCodes& codes = dtype_codes();
  for (const Input& offsets : both) {
    check_rank(offsets, 1);
    check_shape(offsets, {both[0].size[0]});
    if (offsets.dtype_code != codes.int32 && offsets.dtype_code != codes.int64) {
      refuse(offsets.name, " must be an int32 or int64 tensor, but it is ", dtype_text(offsets.dtype_code));
    }
    if (!on_host(offsets.device)) refuse(offsets.name, " must be on the CPU");
  }
  const int64_t count = both[0].size[0], size[] = {2, count}, stride[] = {count, 1};
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;
  if (aoti_torch_empty_strided(2, size, stride, codes.int64, both[0].device.type, both[0].device.index,
                               &handle) != TORCH_SUCCESS) {
    throw AllocationFailure("not enough memory for offsets");
  }
  torch_get_mutable_data_ptr(handle, &data);
  auto* next = static_cast<int64_t*>(data);
  for (const Input& offsets : both) {
    const int64_t step = offsets.stride[0];
    for (int64_t b = 0; b < count; ++b) {
      *next++ = offsets.dtype_code == codes.int64 ? static_cast<const int64_t*>(offsets.data)[b * step]
                                                  : static_cast<const int32_t*>(offsets.data)[b * step];
    }
  }
  return TensorHandle(handle);
}

constexpr bool has_rest(Basic kind) { return kind == Basic::kMasked || kind == Basic::kPacked; }

// The arguments that only the masked and the packed operators have.
struct Rest {
  TensorHandle attn_mask;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  std::optional<double> scale;
  bool is_causal;

  Rest(Stack& stack, Basic kind) : is_causal(kind == Basic::kCausal) {
    if (!has_rest(kind)) return;
    if (kind == Basic::kMasked) {
      attn_mask = stack.optional_tensor();
    } else {
      max_seqlen_q = stack.integer();
      max_seqlen_k = stack.integer();
    }
    scale = stack.optional_number();
    is_causal = stack.flag();
  }

  Options options(TensorHandle offsets) {
    Options options;
    options.offsets = std::move(offsets);
    options.max_seqlen_q = max_seqlen_q;
    options.max_seqlen_k = max_seqlen_k;
    options.attn_mask = four_dimensional(std::move(attn_mask));
    options.is_causal = is_causal;
    return options;
  }
};

// The arguments of both forwards, in the order in which they lie on the stack.
struct Arguments {
  TensorHandle query, key, value, cu_seqlens_q, cu_seqlens_k;
  Rest rest;
  bool enable_gqa;
  Options options;
  ForwardCall call;

  Arguments(Stack& stack, Basic kind)
      : query(stack.tensor()),
        key(stack.tensor()),
        value(stack.tensor()),
        cu_seqlens_q(kind == Basic::kPacked ? stack.tensor() : TensorHandle()),
        cu_seqlens_k(kind == Basic::kPacked ? stack.tensor() : TensorHandle()),
        rest(stack, kind),
        enable_gqa(has_rest(kind) && stack.flag()),
        options(rest.options(kind == Basic::kPacked ? joined_offsets(cu_seqlens_q, cu_seqlens_k)
                                                    : TensorHandle())),
        call(query, key, value, scale_or_default(rest.scale, query), options) {
    // The public functions have the same rule: one kv head serves all, other counts need enable_gqa.
    const AttentionParams& p = call.params;
    if (p.kv_heads != p.heads && p.kv_heads != 1 && !enable_gqa) {
      refuse("key has ", p.kv_heads, " heads and query ", p.heads, ", which needs enable_gqa");
    }
  }
};

// An undefined tensor, which is None in Python.
TensorHandle nothing() {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_uninitialized_tensor(&handle) != TORCH_SUCCESS) {
    throw AllocationFailure("not enough memory for a tensor");
  }
  return TensorHandle(handle);
}

}  // namespace

template <Basic kKind>
void basic_attention(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const Arguments arguments(stack, kKind);
  const ForwardCall& call = arguments.call;
  Output out = call.allocate_out("out");
  const int64_t bytes = call.rows() * size_of(accumulation_dtype(call.params.dtype));
  const Scratch statistics("the row statistics", 2 * bytes, call.query.device);
  run_forward(call, arguments.options.kernel_name, out, {{}, statistics.data(), statistics.data() + bytes});
  stack.put(out.handle);
}

template <Basic kKind>
void basic_attention_forward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  Arguments arguments(stack, kKind);
  const ForwardCall& call = arguments.call;
  const AttentionParams& p = call.params;
  Output out = call.allocate_out("out");
  Output statistics = allocate("statistics", {2, query_batch(p), p.heads, query_rows(p)},
                               accumulation_dtype(p.dtype), call.query.device);
  if (leaves_rows_out(p, call.query.device)) statistics.fill_zero();
  Output residual;
  if (call.rounds()) {
    residual = call.allocate_out("out_residual");
  } else {
    residual.handle = nothing();
  }
  char* row_max = static_cast<char*>(statistics.data);
  run_forward(call, arguments.options.kernel_name, out,
              {{}, row_max, row_max + statistics.bytes / 2, residual.data});
  if (kKind == Basic::kPacked) {
    stack.put(out.handle, statistics.handle, residual.handle, arguments.options.offsets);
  } else {
    stack.put(out.handle, statistics.handle, residual.handle);
  }
}

template <Basic kKind>
void basic_attention_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  BackwardTensors tensors(stack);
  tensors.statistics = stack.tensor();
  if (has_rest(kKind)) tensors.out_residual = stack.optional_tensor();
  TensorHandle offsets = kKind == Basic::kPacked ? stack.tensor() : TensorHandle();
  Rest rest(stack, kKind);

  const double scale = scale_or_default(rest.scale, tensors.query);
  Gradients grads = run_backward(tensors, scale, false, rest.options(std::move(offsets)));
  stack.put(grads.query.handle, grads.key.handle, grads.value.handle);
}

template void basic_attention<Basic::kAlone>(StableIValue*, uint64_t, uint64_t);
template void basic_attention<Basic::kCausal>(StableIValue*, uint64_t, uint64_t);
template void basic_attention<Basic::kMasked>(StableIValue*, uint64_t, uint64_t);
template void basic_attention<Basic::kPacked>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_forward<Basic::kAlone>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_forward<Basic::kCausal>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_forward<Basic::kMasked>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_forward<Basic::kPacked>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_backward<Basic::kAlone>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_backward<Basic::kCausal>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_backward<Basic::kMasked>(StableIValue*, uint64_t, uint64_t);
template void basic_attention_backward<Basic::kPacked>(StableIValue*, uint64_t, uint64_t);

}  // namespace selfattn::ops
