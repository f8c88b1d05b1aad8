// The engine of the CPU, and the choice between it and that of CUDA.
#include "engine.h"

#include "../core/option_names.h"
#include "../core/sequences.h"
#include "../cpu/append_to_cache_cpu.h"
#include "../cpu/cpu_kernel_table.h"
#include "attention_arguments.h"
#include "outputs.h"
#include "run_kernel.h"

namespace selfattn::ops {

namespace {

// See Note [Declared options] in core/options.h.
void require_declared(const cpu::Kernel& kernel, OptionSet used) {
  if (used.within(kernel.options)) return;
  refuse("kernel \"", kernel.name, "\" (", kernel.isa, ") does not apply ",
         names_of(used.without(kernel.options)).c_str());
}

// Forward mode and second derivatives take no functions of scores and no selected keys, and not every kernel
// has them.
void require_derivatives(const cpu::Kernel& kernel, const AttentionParams& p) {
  if (kernel.jvp == nullptr) {
    refuse("kernel \"", kernel.name, "\" (", kernel.isa,
           ") has no forward mode and no second derivatives; kernel \"fused\" has both");
  }
  const OptionSet used = options_of(p);
  constexpr OptionSet kLacking = {Option::kFunction, Option::kBlockMap, Option::kSelection};
  const OptionSet rest = used.without(used.without(kLacking));
  if (rest.empty()) return;
  refuse("kernel \"", kernel.name, "\" (", kernel.isa,
         ") has no forward mode and no second derivatives with ", names_of(rest).c_str());
}

// Calls with selected keys have a forward and a backward of their own, in some kernels.
void require_selected(const cpu::Kernel& kernel, const AttentionParams& p) {
  if (kernel.selected_forward == nullptr) {
    refuse("kernel \"", kernel.name, "\" (", kernel.isa, ") does not apply selection");
  }
  const OptionSet rest = options_of(p).without(cpu::kSelectedOptions);
  if (!rest.empty()) refuse("selection was given together with ", names_of(rest).c_str());
}

// Calls function(params, arguments) for the whole call, or for each batch element if the kernel does not
// apply the options of sequences.
template <class Arguments, class Function>
void for_each_call(const cpu::Kernel& kernel, const AttentionParams& p, const Arguments& arguments,
                   const Function& function) {
  if (p.batch * p.heads * p.queries == 0) return;
  const OptionSet used = options_of(p);
  require_declared(kernel, used.without(kSequenceOptions));
  if (used.within(kernel.options)) {
    function(p, arguments);
  } else {
    for (int64_t b = 0; b < p.batch; ++b) {
      const AttentionParams element = element_of(p, b);
      require_declared(kernel, options_of(element));
      if (element.queries > 0) function(element, element_of(arguments, p, b));
    }
  }
  if (p.function.table != nullptr && *p.function.inputs.out_of_range != 0) {
    throw std::out_of_range("score_function reads outside a captured tensor, for a score that is not hidden");
  }
}

void forward(const char* kernel, const AttentionParams& p, const ForwardOutputs& outputs, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.selection.lists != nullptr) {
    require_selected(chosen, p);
    check_selected(p, outputs);
    if (p.batch * p.heads * p.queries > 0) run_kernel(chosen.selected_forward, p, outputs);
    return;
  }
  for_each_call(chosen, p, outputs, [&](const AttentionParams& call, const ForwardOutputs& results) {
    run_kernel(chosen.forward, call, results);
  });
}

void weights(const char* kernel, const AttentionParams& p, const WeightsOutputs& outputs, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  for_each_call(chosen, p, outputs, [&](const AttentionParams& call, const WeightsOutputs& results) {
    if (call.keys > 0) run_kernel(chosen.weights, call, results);
  });
}

void weight_sums(const char* kernel, const AttentionParams& p, const WeightSums& sums, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  for_each_call(chosen, p, sums, [&](const AttentionParams& call, const WeightSums& results) {
    if (call.keys > 0) run_kernel(chosen.weight_sums, call, results);
  });
}

// Runs a function of the kernel table that takes parameters alone.
template <auto kFunction, class Params>
void run(const char* kernel, const Params& p, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.batch * p.heads * p.queries > 0 && p.keys > 0) run_kernel(chosen.*kFunction, p);
}

void backward(const char* kernel, const AttentionParams& p, const BackwardArguments& arguments,
              Device device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.selection.lists != nullptr) {
    require_selected(chosen, p);
    check_selected(p, arguments);
    if (p.batch * p.heads * p.queries == 0) return;
    const Scratch workspace("the backward's workspace", chosen.selected_backward_workspace(p), device);
    BackwardArguments a = arguments;
    a.workspace = workspace.data();
    run_kernel(chosen.selected_backward, p, a);
    return;
  }
  for_each_call(chosen, p, arguments, [&](const AttentionParams& call, BackwardArguments a) {
    const Scratch workspace("the backward's workspace", chosen.backward_workspace(call), device);
    a.workspace = workspace.data();
    run_kernel(chosen.backward, call, a);
  });
}

void jvp(const char* kernel, const AttentionParams& p, const JvpArguments& arguments, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  require_derivatives(chosen, p);
  for_each_call(chosen, p, arguments,
                [&](const AttentionParams& call, const JvpArguments& a) { run_kernel(chosen.jvp, call, a); });
}

void backward_backward(const char* kernel, const AttentionParams& p,
                       const BackwardBackwardArguments& arguments, Device device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  require_derivatives(chosen, p);
  for_each_call(chosen, p, arguments, [&](const AttentionParams& call, BackwardBackwardArguments a) {
    const Scratch workspace("the workspace of second derivatives", chosen.backward_backward_workspace(call),
                            device);
    a.backward.workspace = workspace.data();
    run_kernel(chosen.backward_backward, call, a);
  });
}

void captured_gradients(const char* kernel, const AttentionParams& p, const BackwardArguments& arguments,
                        const CapturedGradients& gradients, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  for_each_call(chosen, p, arguments, [&](const AttentionParams& call, const BackwardArguments& a) {
    if (call.keys > 0) run_kernel(chosen.captured_gradients, call, a, gradients);
  });
}

// The sum is serial and in double, so that the result depends on nothing but the rows.
template <class T>
void sum_of_rows(const AttentionParams& p, const T* rows, T* sums, bool shared_by_batch) {
  for (int64_t b = 0; b < (shared_by_batch ? 1 : p.batch); ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      double sum = 0.0;
      for (int64_t source = b; source < (shared_by_batch ? p.batch : b + 1); ++source) {
        const T* row = rows + first_row_of(p, source) + p.row(0, h, 0);
        const int64_t queries = queries_of(p, source).count;
        for (int64_t i = 0; i < queries; ++i) sum += static_cast<double>(row[i]);
      }
      sums[b * p.heads + h] = static_cast<T>(sum);
    }
  }
}

void sum_of_rows(const AttentionParams& p, const void* rows, void* sums, bool shared_by_batch, Device) {
  if (accumulation_dtype(p.dtype) == DType::kFloat64) {
    sum_of_rows(p, static_cast<const double*>(rows), static_cast<double*>(sums), shared_by_batch);
  } else {
    sum_of_rows(p, static_cast<const float*>(rows), static_cast<float*>(sums), shared_by_batch);
  }
}

void append(const AppendParams& a, Device) {
  // A thread copies about 16 bytes in a nanosecond.
  const int64_t bytes = a.kv_heads * a.rows * (a.head_dim + a.value_dim) * size_of(a.dtype);
  const int64_t copied = bytes * (a.row_starts == nullptr ? a.batch : 1);
  cpu::append_to_cache(a, thread_pool(static_cast<double>(copied) / 16));
}

std::string refusals(const char* kernel, const AttentionParams& p, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  int count = 0;
  const cpu::Kernel* const* kernels = cpu::all_kernels(&count);
  std::string lines;
  for (int n = 0; n < count; ++n) {
    const cpu::Kernel& asked = kernels[n]->when_forced == &chosen ? chosen : *kernels[n];
    const cpu::Kernel* other = asked.hands_on_to == nullptr ? nullptr : asked.hands_on_to(p);
    if (n > 0) lines += '\n';
    if (const char* reason = cpu::unavailable_reason(asked)) {
      lines += reason;
    } else if (other != nullptr) {
      lines += std::string("passes such calls on to ") + other->isa;
    }
  }
  return lines;
}

constexpr Engine kCpuEngine = {&forward,
                               &weights,
                               &weight_sums,
                               &run<&cpu::Kernel::scores>,
                               &run<&cpu::Kernel::masked_softmax>,
                               &backward,
                               &sum_of_rows,
                               &run<&cpu::Kernel::scores_backward>,
                               &run<&cpu::Kernel::masked_softmax_backward>,
                               &append,
                               &jvp,
                               &backward_backward,
                               &captured_gradients,
                               &refusals};

const CudaPart* announced = nullptr;

}  // namespace

const Engine& engine_of(Device device) {
  // The operators are registered for these two kinds of device alone.
  return device.type == aoti_torch_device_type_cpu() ? kCpuEngine : announced->engine;
}

const CudaPart* cuda_part() { return announced; }

AnnounceCudaPart::AnnounceCudaPart(const CudaPart& part) { announced = &part; }

}  // namespace selfattn::ops
