// Kernels with a function of scores inside, for the emulator. They are simt's in float32, sm80's in float16
// up to 64 dims, and the gradients of captured tensors, compiled for each function with the headers that
// NVRTC gets (Note [Functions in kernels]); tests/cuda/test_emulated_functions.py calls them.
#include <cmath>
#include <exception>
#include <memory>
#include <string>

#include "cuda/rows/rows.h"
#include "cuda/simt/backward.cuh"
#include "cuda/simt/captured_gradient.cuh"
#include "cuda/simt/forward.cuh"
#include "cuda/sm80/backward/sm80_backward_launch.cuh"
#include "cuda/sm80/sm80_launch.cuh"
#include "device_memory.h"

namespace selfattn {

namespace {

// As in test_emulated_functions.py. Tensors are contiguous.
struct Problem {
  int64_t is_half, batch, heads, queries, keys, dim;
  void *query, *key, *value, *out, *row_max, *row_sum;
  void *grad_out, *grad_query, *grad_key, *grad_value;
  const void* function;  // FunctionArguments
  int64_t tensors;
  const int64_t* sizes;  // of the captured gradients
  double* sums;
};

struct Workspace {
  std::unique_ptr<void, void (*)(void*)> memory;
  explicit Workspace(size_t bytes)
      : memory(emulator::allocate_device_memory(bytes > 0 ? bytes : 1), &emulator::free_device_memory) {}
  cuda::Launch launch() const { return {nullptr, memory.get()}; }
};

View rows_of(const Problem& it, DType dtype, void* data, int64_t rows) {
  return {data, dtype, {it.heads * rows * it.dim, rows * it.dim, it.dim, 1}};
}

template <DType kDType>
void captured_gradients(const AttentionParams& p, const BackwardArguments& a, const CapturedGradients& g) {
  const Workspace workspace(cuda::simt::captured_workspace<kDType>(p, g));
  cuda::rows::prepare(p, a, workspace.memory.get(), workspace.launch());
  cuda::simt::captured_gradients<kDType>(p, a, g, workspace.launch());
}

void run_simt(const AttentionParams& p, const ForwardOutputs& outputs, const BackwardArguments& a,
              const CapturedGradients& g) {
  constexpr DType kDType = DType::kFloat32;
  cuda::simt::forward<kDType>(p, outputs, Workspace(cuda::split_workspace<float>(p, false)).launch());
  const Workspace workspace(cuda::rows::row_gradients_bytes(p));
  cuda::rows::prepare(p, a, workspace.memory.get(), workspace.launch());
  cuda::simt::backward<kDType>(p, a, workspace.launch());
  if (g.size() > 0) captured_gradients<kDType>(p, a, g);
}

void run_sm80(const AttentionParams& p, const ForwardOutputs& outputs, const BackwardArguments& a,
              const CapturedGradients& g) {
  constexpr DType kDType = DType::kFloat16;
  const Workspace splits(cuda::mma::forward_workspace(p));
  cuda::sm80::run_forward<kDType, 64>(p, outputs, nullptr, splits.memory.get());
  const Workspace workspace(cuda::mma::backward::statistics_bytes(p));
  const auto statistics = cuda::mma::backward::prepare_statistics(p, a, workspace.launch());
  cuda::sm80::backward::run_sides<kDType, 64>(p, a, statistics, nullptr);
  if (g.size() > 0) captured_gradients<kDType>(p, a, g);
}

void run(const Problem& it) {
  const DType dtype = it.is_half != 0 ? DType::kFloat16 : DType::kFloat32;
  AttentionParams p;
  p.batch = it.batch;
  p.heads = p.kv_heads = it.heads;
  p.queries = p.rows_per_head = it.queries;
  p.keys = it.keys;
  p.head_dim = p.value_dim = it.dim;
  p.dtype = dtype;
  p.scale = 1.0 / std::sqrt(static_cast<double>(it.dim));
  p.query = rows_of(it, dtype, it.query, it.queries);
  p.key = rows_of(it, dtype, it.key, it.keys);
  p.value = rows_of(it, dtype, it.value, it.keys);
  const ScoreFunctionTable table{};
  p.function.table = &table;
  std::memcpy(&p.function.arguments, it.function, sizeof(FunctionArguments));

  ForwardOutputs outputs;
  outputs.out = rows_of(it, dtype, it.out, it.queries);
  outputs.row_max = it.row_max;
  outputs.row_sum = it.row_sum;
  BackwardArguments a;
  a.grad_out = rows_of(it, dtype, it.grad_out, it.queries);
  a.out = outputs.out;
  a.row_max = it.row_max;
  a.row_sum = it.row_sum;
  a.grad_query = rows_of(it, dtype, it.grad_query, it.queries);
  a.grad_key = rows_of(it, dtype, it.grad_key, it.keys);
  a.grad_value = rows_of(it, dtype, it.grad_value, it.keys);
  CapturedGradients g;
  g.sizes = it.sizes;
  g.count = it.tensors;
  g.sums = it.sums;
  (it.is_half != 0 ? &run_sm80 : &run_simt)(p, outputs, a, g);
}

}  // namespace

// What the emulator has reported, nullptr for nothing.
extern "C" __attribute__((visibility("default"))) const char* run_function_kernels(const Problem* problem) {
  static std::string report;
  try {
    run(*problem);
    return nullptr;
  } catch (const std::exception& error) {
    report = error.what();
    return report.c_str();
  }
}

}  // namespace selfattn
