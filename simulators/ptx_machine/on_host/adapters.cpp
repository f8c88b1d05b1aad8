// The CUDA kernels as rows of the CPU's kernel table, for tensors of the CPU in memory that the machine
// knows. So the operators, and all tests of the operators, can run on them with any torch.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "core/sequences.h"
#include "cpu/cpu_kernel_table.h"
#include "cpu/loops/loops.h"
#include "cuda/cuda_kernel_table.h"
#include "cuda/rows/rows.h"

// Stands for every instance of a kernel that the build has left out (missing_instances.py).
extern "C" __attribute__((visibility("hidden"))) void selfattn_missing_instance(const char* name) {
  throw std::runtime_error(std::string("this build lacks ") + name);
}

namespace selfattn::cpu {

namespace {

struct Workspace {
  std::unique_ptr<void, cudaError_t (*)(void*)> memory{nullptr, &cudaFree};

  explicit Workspace(size_t bytes) {
    void* made = nullptr;
    if (bytes > 0 && cudaMalloc(&made, bytes) != cudaSuccess) throw std::bad_alloc();
    memory.reset(made);
  }
};

int capability() {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  return 10 * major + minor;
}

const cuda::Kernel& by_name(const char* name) {
  int count = 0;
  const cuda::Kernel* const* kernels = cuda::all_kernels(&count);
  for (int n = 0; n < count; ++n) {
    if (std::strcmp(kernels[n]->name, name) == 0) return *kernels[n];
  }
  // This throws an error that says which names there are.
  return cuda::choose_kernel(name, AttentionParams(), capability());
}

// Adds up the rows' gradients of slopes or sinks, as the operators do on CUDA. On the CPU the operators add
// up rows themselves, so each batch and head gets its sum in one row and zeros in the others.
void add_up_rows(const AttentionParams& p, const HeadScalars& coefficient, void* rows) {
  if (rows == nullptr) return;
  const bool shared_by_batch = coefficient.batch_stride == 0;
  const size_t size = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  const size_t heads = static_cast<size_t>((shared_by_batch ? 1 : p.batch) * p.heads);
  const Workspace sums(heads * size);
  cuda::rows::sum_of_rows(p, rows, sums.memory.get(), shared_by_batch, {});
  for (int64_t head = 0; head < p.heads; ++head) {
    bool placed = false;
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      const auto queries = static_cast<size_t>(queries_of(p, batch).count);
      if (queries == 0) continue;
      const int64_t first = first_row_of(p, batch) + p.row(0, head, 0);
      char* const row = static_cast<char*>(rows) + static_cast<size_t>(first) * size;
      std::memset(row, 0, queries * size);
      if (shared_by_batch && placed) continue;
      const auto sum = static_cast<size_t>((shared_by_batch ? 0 : batch) * p.heads + head);
      std::memcpy(row, static_cast<char*>(sums.memory.get()) + sum * size, size);
      placed = true;
    }
  }
}

constexpr const char* kSm90 = "sm90";
constexpr const char* kSm80 = "sm80";
constexpr const char* kSimt = "simt";

// Name is one of the above. A call that this kernel refuses goes to the kernel that takes such calls in its
// place.
template <const char* const& kName>
struct OnHost {
  static const cuda::Kernel& kernel_for(const AttentionParams& p) {
    const cuda::Kernel& kernel = by_name(kName);
    const bool takes = cuda::refusal_of(kernel, p, capability()).empty();
    return takes ? kernel : cuda::choose_kernel("", p, capability());
  }

  static const cuda::Kernel& derivatives_for(const AttentionParams& p) {
    const cuda::Kernel& kernel = kernel_for(p);
    return kernel.jvp != nullptr ? kernel : by_name(kSimt);
  }

  static const cuda::Kernel& statistics_for(const AttentionParams& p) {
    const cuda::Kernel& kernel = kernel_for(p);
    return kernel.statistics != nullptr ? kernel : by_name(kSimt);
  }

  static void forward(const AttentionParams& p, const ForwardOutputs& outputs, const ThreadPool&) {
    const cuda::Kernel& kernel = kernel_for(p);
    for_each_launch(p, outputs, [&](const AttentionParams& call, const ForwardOutputs& results) {
      const Workspace workspace(kernel.forward_workspace(call));
      kernel.forward(call, results, {nullptr, workspace.memory.get()});
      if (results.row_mean != nullptr) statistics_for(p).statistics(call, results, {});
    });
  }
  static void weight_sums(const AttentionParams& p, const WeightSums& sums, const ThreadPool&) {
    const cuda::Kernel& kernel = statistics_for(p);
    for_each_launch(p, sums, [&](const AttentionParams& call, const WeightSums& results) {
      if (call.keys > 0) kernel.weight_sums(call, results, {});
    });
  }
  static void weights(const AttentionParams& p, const WeightsOutputs& outputs, const ThreadPool&) {
    const cuda::Kernel& kernel = kernel_for(p);
    for_each_launch(p, outputs, [&](const AttentionParams& call, const WeightsOutputs& results) {
      if (call.keys > 0) kernel.weights(call, results, {});
    });
  }
  // Calls the kernel's own function, or that of "simt" where the kernel leaves the function to it.
  template <auto kFunction, class Params>
  static void run(const Params& p, const ThreadPool&) {
    const auto own = by_name(kName).*kFunction;
    (own != nullptr ? own : by_name(kSimt).*kFunction)(p, {});
  }

  // How much memory a backward needs is known only with the call's arguments, so backward() allocates it.
  static size_t backward_workspace(const AttentionParams&) { return 0; }
  static void backward(const AttentionParams& p, const BackwardArguments& arguments, const ThreadPool&) {
    const bool of_statistics = arguments.grad_mean != nullptr || arguments.grad_keys != nullptr;
    const cuda::Kernel& kernel = of_statistics ? statistics_for(p) : kernel_for(p);
    for_each_launch(p, arguments, [&](const AttentionParams& call, const BackwardArguments& a) {
      const Workspace workspace(kernel.backward_workspace(call, a));
      kernel.backward(call, a, {nullptr, workspace.memory.get()});
    });
    add_up_rows(p, p.alibi_slopes, arguments.grad_slopes_rows);
    add_up_rows(p, p.sinks, arguments.grad_sinks_rows);
  }

  static void jvp(const AttentionParams& p, const JvpArguments& arguments, const ThreadPool&) {
    const cuda::Kernel& kernel = derivatives_for(p);
    for_each_launch(p, arguments, [&](const AttentionParams& call, const JvpArguments& a) {
      const Workspace workspace(kernel.forward_workspace(call));
      kernel.jvp(call, a, {nullptr, workspace.memory.get()});
    });
  }
  static void backward_backward(const AttentionParams& p, const BackwardBackwardArguments& arguments,
                                const ThreadPool&) {
    const cuda::Kernel& kernel = derivatives_for(p);
    for_each_launch(p, arguments, [&](const AttentionParams& call, const BackwardBackwardArguments& a) {
      const Workspace workspace(kernel.backward_backward_workspace(call, a));
      kernel.backward_backward(call, a, {nullptr, workspace.memory.get()});
    });
    add_up_rows(p, p.alibi_slopes, arguments.backward.grad_slopes_rows);
    add_up_rows(p, p.sinks, arguments.backward.grad_sinks_rows);
  }

  static Kernel row(const char* description) {
    Kernel kernel{};
    kernel.name = kName;
    kernel.isa = "ptx";
    kernel.description = description;
    kernel.automatic = false;
    kernel.forward = &forward;
    kernel.weights = &weights;
    kernel.weight_sums = &weight_sums;
    kernel.backward_workspace = &backward_workspace;
    kernel.backward = &backward;
    kernel.selected_forward = &forward;
    kernel.selected_backward_workspace = &backward_workspace;
    kernel.selected_backward = &backward;
    kernel.jvp = &jvp;
    kernel.backward_backward_workspace = &backward_workspace;
    kernel.backward_backward = &backward_backward;
    kernel.scores = &run<&cuda::Kernel::scores>;
    kernel.scores_backward = &run<&cuda::Kernel::scores_backward>;
    kernel.masked_softmax = &run<&cuda::Kernel::masked_softmax>;
    kernel.masked_softmax_backward = &run<&cuda::Kernel::masked_softmax_backward>;
    kernel.options =
        by_name(kName).options.without({Option::kFunction, Option::kBlockMap, Option::kSelection});
    return kernel;
  }
};

}  // namespace

// Declared in csrc/cpu/cpu_kernel_table.cpp.
extern const Kernel kFusedScalar;
extern const Kernel kCudaSm90;
extern const Kernel kCudaSm80;
extern const Kernel kCudaSimt;
const Kernel kCudaSm90 = OnHost<kSm90>::row("the CUDA kernel for Hopper, on the PTX machine");
const Kernel kCudaSm80 = OnHost<kSm80>::row("the CUDA kernel with tensor cores, on the PTX machine");
// The kernel that the CPU chooses by itself. Here it is the loops: no test here needs the fused kernel, which
// would take a tenth of the build's time to compile.
const Kernel kFusedScalar = [] {
  Kernel kernel = kLoops;
  kernel.name = "fused";
  kernel.automatic = true;
  return kernel;
}();
const Kernel kCudaSimt = OnHost<kSimt>::row("the portable CUDA kernel, on the PTX machine");

}  // namespace selfattn::cpu
