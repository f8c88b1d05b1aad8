// Calls of a kernel on plain memory: random inputs for any options, and the results as numbers.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cpu_kernel_table.h"

namespace selfattn::test {

constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Returns the kernels that this machine can run, and those that replace them when they are forced.
inline std::vector<const cpu::Kernel*> available_kernels() {
  int count = 0;
  const cpu::Kernel* const* all = cpu::all_kernels(&count);
  std::vector<const cpu::Kernel*> list;
  for (int n = 0; n < count; ++n) {
    if (cpu::unavailable_reason(*all[n]) != nullptr) continue;
    list.push_back(all[n]);
    if (all[n]->when_forced != nullptr) list.push_back(all[n]->when_forced);
  }
  return list;
}

// Returns those of them that take packed sequences and caches.
inline std::vector<const cpu::Kernel*> sequence_kernels() {
  std::vector<const cpu::Kernel*> list;
  for (const cpu::Kernel* kernel : available_kernels()) {
    if (kSequenceOptions.within(kernel->options)) list.push_back(kernel);
  }
  return list;
}

// Returns those of them with forward mode and second derivatives, the portable one last.
inline std::vector<const cpu::Kernel*> tangent_kernels() {
  std::vector<const cpu::Kernel*> list;
  for (const cpu::Kernel* kernel : available_kernels()) {
    if (kernel->jvp != nullptr) list.push_back(kernel);
  }
  return list;
}

// A tensor with an allocation of exactly its size, between margins that must stay untouched.
class Buffer {
 public:
  Buffer(DType dtype, const std::vector<int64_t>& size) : dtype_(dtype), size_(size) {
    size_.insert(size_.begin(), 4 - size.size(), 1);
    int64_t stride = 1;
    for (int d = 3; d >= 0; --d) {
      stride_[d] = stride;
      stride *= size_[d];
    }
    count_ = stride;
    bytes_.assign(static_cast<size_t>(count_ * size_of(dtype)) + 2 * kMargin, kUntouched);
  }

  // The same shape in memory order (batch, row, head, column).
  void put_heads_inside() {
    stride_[1] = size_[3];
    stride_[2] = size_[1] * size_[3];
  }

  void* data() { return bytes_.data() + kMargin; }
  const void* data() const { return bytes_.data() + kMargin; }
  DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  const std::vector<int64_t>& size() const { return size_; }

  // Returns element n, counted in the order of the dimensions, whatever the memory order.
  double get(int64_t n) const { return load_element<double>(data(), dtype_, offset(n)); }
  void set(int64_t n, double value) { store_element<double>(data(), dtype_, offset(n), value); }
  // Returns a buffer of the same layout with one number everywhere. NaN shows what a kernel leaves unwritten.
  Buffer filled(double value) const {
    Buffer buffer = *this;
    for (int64_t n = 0; n < count_; ++n) buffer.set(n, value);
    return buffer;
  }
  // Returns whether two buffers of the same layout have the same bits.
  bool has_bits_of(const Buffer& other) const {
    return count_ == other.count_ &&
           std::memcmp(data(), other.data(), static_cast<size_t>(count_ * size_of(dtype_))) == 0;
  }

  View view() { return View{data(), dtype_, {stride_[0], stride_[1], stride_[2], stride_[3]}}; }
  // Returns a view with stride 0 along dimensions of size 1.
  View broadcast_view() {
    View v = view();
    for (int d = 0; d < 4; ++d) {
      if (size_[d] == 1) v.stride[d] = 0;
    }
    return v;
  }

  bool margins_untouched() const {
    for (size_t n = 0; n < kMargin; ++n) {
      if (bytes_[n] != kUntouched || bytes_[bytes_.size() - 1 - n] != kUntouched) return false;
    }
    return true;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kMargin = 0;  // so that the sanitizer sees reads beyond the tensor, too
#else
  static constexpr size_t kMargin = 64;
#endif
  static constexpr unsigned char kUntouched = 0xA5;

  int64_t offset(int64_t n) const {
    int64_t at = 0;
    for (int d = 3; d >= 0; --d) {
      at += n % size_[d] * stride_[d];
      n /= size_[d];
    }
    return at;
  }

  DType dtype_;
  std::vector<int64_t> size_;
  int64_t stride_[4];
  int64_t count_ = 0;
  std::vector<unsigned char> bytes_;
};

struct Options {
  bool mask = false;
  bool boolean_mask = false;
  bool broadcast_mask = false;
  bool slopes = false;
  bool sinks = false;
  double dropout = 0.0;
  double softcap = 0.0;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t query_offset = 0;
  bool grad_weights = false;

  std::string text() const {
    std::string all;
    if (mask) all += boolean_mask ? " boolean mask" : " mask";
    if (broadcast_mask) all += " broadcast";
    if (slopes) all += " slopes";
    if (sinks) all += " sinks";
    if (dropout > 0) all += " dropout";
    if (softcap > 0) all += " softcap";
    if (grad_weights) all += " grad_weights";
    return all + " window " + std::to_string(window_left) + ".." + std::to_string(window_right) + " offset " +
           std::to_string(query_offset);
  }
};

struct Shape {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2862933555777941757u + 3037000493u) {}
  // Returns numbers that are uniform in [-1, 1).
  double next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) / static_cast<double>(uint64_t{1} << 52) - 1.0;
  }
  void fill(Buffer& buffer) {
    for (int64_t n = 0; n < buffer.count(); ++n) buffer.set(n, next());
  }

 private:
  uint64_t state_;
};

// The inputs of one call.
struct AttentionCase {
  DType dtype;
  Shape shape;
  Options options;
  Buffer query, key, value, mask, slopes, sinks, grad_out, grad_weights, grad_row;
  int64_t seed = 1234567890123456789;
  ScoreFunction function;  // in_float64() drops it

  AttentionCase(DType type, const Shape& s, const Options& o, bool heads_inside = false)
      : dtype(type),
        shape(s),
        options(o),
        query(type, {s.batch, s.heads, s.queries, s.head_dim}),
        key(type, {s.batch, s.kv_heads, s.keys, s.head_dim}),
        value(type, {s.batch, s.kv_heads, s.keys, s.value_dim}),
        mask(o.boolean_mask ? DType::kBool : type, o.broadcast_mask
                                                       ? std::vector<int64_t>{1, s.heads, 1, s.keys}
                                                       : std::vector<int64_t>{s.batch, 1, s.queries, s.keys}),
        slopes(accumulation(type), {1, s.heads}),
        sinks(accumulation(type), {s.batch, s.heads}),
        grad_out(type, {s.batch, s.heads, s.queries, s.value_dim}),
        grad_weights(type, {s.batch, s.heads, s.queries, s.keys}),
        grad_row(accumulation(type), {s.batch, s.heads, s.queries}) {
    if (heads_inside) {
      for (Buffer* buffer : {&query, &key, &value, &grad_out}) buffer->put_heads_inside();
    }
    Random random(17);
    for (Buffer* buffer : {&query, &key, &value, &slopes, &sinks, &grad_out, &grad_weights, &grad_row}) {
      random.fill(*buffer);
    }
    for (int64_t n = 0; n < mask.count(); ++n) {
      const double x = random.next();
      mask.set(n, o.boolean_mask ? x < 0.3 : (x < 0.3 ? x : -INFINITY));
    }
  }

  static DType accumulation(DType type) {
    return type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  // Returns the same case with its numbers in float64.
  AttentionCase in_float64() const {
    AttentionCase wide(DType::kFloat64, shape, options);
    const Buffer* from[] = {&query, &key,      &value,        &mask,    &slopes,
                            &sinks, &grad_out, &grad_weights, &grad_row};
    Buffer* to[] = {&wide.query, &wide.key,      &wide.value,        &wide.mask,    &wide.slopes,
                    &wide.sinks, &wide.grad_out, &wide.grad_weights, &wide.grad_row};
    for (int b = 0; b < 9; ++b) {
      for (int64_t n = 0; n < from[b]->count(); ++n) to[b]->set(n, from[b]->get(n));
    }
    return wide;
  }

  AttentionParams params() {
    AttentionParams p;
    p.batch = shape.batch;
    p.heads = shape.heads;
    p.kv_heads = shape.kv_heads;
    p.queries = shape.queries;
    p.keys = shape.keys;
    p.rows_per_head = shape.queries;
    p.head_dim = shape.head_dim;
    p.value_dim = shape.value_dim;
    p.dtype = dtype;
    p.query = query.view();
    p.key = key.view();
    p.value = value.view();
    if (options.mask) p.mask = mask.broadcast_view();
    if (options.slopes) p.alibi_slopes = {slopes.data(), 0, 1};
    if (options.sinks) p.sinks = {sinks.data(), shape.heads, 1};
    if (options.dropout > 0) p.dropout = {true, options.dropout, &seed};
    p.scale = 0.7;
    p.softcap = options.softcap;
    p.window_left = options.window_left;
    p.window_right = options.window_right;
    p.query_offset = options.query_offset;
    p.function = function;
    return p;
  }
};

// Memory that kernels ask for besides their arguments; there is none if they ask for no bytes.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_(bytes > 0 ? ::operator new(bytes, kAlignment) : nullptr) {}
  void* data() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<void, Free> memory_;
};

// What forward, weights and backward of one kernel write.
struct AttentionResults {
  Buffer out, out_residual, row_max, row_sum, weights;
  Buffer grad_query, grad_key, grad_value, grad_mask, grad_slopes_rows, grad_sinks_rows;

  AttentionResults(const cpu::Kernel& kernel, AttentionCase& c, const cpu::ThreadPool& pool)
      : out(c.grad_out.filled(NAN)),
        out_residual(c.grad_out.filled(NAN)),
        row_max(AttentionCase::accumulation(c.dtype), c.grad_row.size()),
        row_sum(row_max),
        weights(c.dtype, c.grad_weights.size()),
        grad_query(c.query.filled(NAN)),
        grad_key(c.key.filled(NAN)),
        grad_value(c.value.filled(NAN)),
        grad_mask(c.mask.filled(NAN)),
        grad_slopes_rows(row_max),
        grad_sinks_rows(row_max) {
    const AttentionParams p = c.params();
    ForwardOutputs forward;
    forward.out = out.view();
    forward.row_max = row_max.data();
    forward.row_sum = row_sum.data();
    const bool rounded = size_of(c.dtype) == 2;
    if (rounded) forward.out_residual = out_residual.data();
    kernel.forward(p, forward, pool);
    kernel.weights(p, {row_max.data(), row_sum.data(), weights.view()}, pool);

    BackwardArguments a;
    a.grad_out = c.grad_out.view();
    a.out = out.view();
    if (rounded) a.out_residual = out_residual.view();
    a.row_max = row_max.data();
    a.row_sum = row_sum.data();
    a.grad_row = c.grad_row.data();
    if (c.options.grad_weights) a.grad_weights = c.grad_weights.view();
    a.grad_query = grad_query.view();
    a.grad_key = grad_key.view();
    a.grad_value = grad_value.view();
    if (c.options.mask && !c.options.boolean_mask) {
      for (int64_t n = 0; n < grad_mask.count(); ++n) grad_mask.set(n, 0.0);
      a.grad_mask = grad_mask.broadcast_view();
    }
    if (c.options.slopes) a.grad_slopes_rows = grad_slopes_rows.data();
    if (c.options.sinks) a.grad_sinks_rows = grad_sinks_rows.data();
    const Workspace workspace(kernel.backward_workspace(p));
    a.workspace = workspace.data();
    kernel.backward(p, a, pool);
  }

  // Returns those that the options ask for, with their names.
  std::vector<std::pair<const char*, const Buffer*>> all(const Options& options) const {
    std::vector<std::pair<const char*, const Buffer*>> list = {{"out", &out},
                                                               {"row_max", &row_max},
                                                               {"row_sum", &row_sum},
                                                               {"weights", &weights},
                                                               {"grad_query", &grad_query},
                                                               {"grad_key", &grad_key},
                                                               {"grad_value", &grad_value}};
    if (options.mask && !options.boolean_mask) list.push_back({"grad_mask", &grad_mask});
    if (options.slopes) list.push_back({"grad_slopes_rows", &grad_slopes_rows});
    if (options.sinks) list.push_back({"grad_sinks_rows", &grad_sinks_rows});
    return list;
  }
};

}  // namespace selfattn::test
