#include "engine.h"

#include "../cpu/kernel_table.h"
#include "run_kernel.h"

namespace selfattn::ops {

namespace {

void forward(const char* kernel, const AttentionParams& p, const ForwardOutputs& outputs, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.batch * p.heads * p.queries > 0) run_kernel(chosen.forward, p, outputs);
}

void weights(const char* kernel, const AttentionParams& p, const WeightsOutputs& outputs, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.batch * p.heads * p.queries > 0 && p.keys > 0) run_kernel(chosen.weights, p, outputs);
}

void scores(const char* kernel, const ScoresParams& p, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.batch * p.heads * p.queries > 0 && p.keys > 0) run_kernel(chosen.scores, p);
}

void masked_softmax(const char* kernel, const SoftmaxParams& p, Device) {
  const cpu::Kernel& chosen = cpu::choose_kernel(kernel);
  if (p.batch * p.heads * p.queries > 0 && p.keys > 0) run_kernel(chosen.masked_softmax, p);
}

constexpr Engine kCpuEngine = {&forward, &weights, &scores, &masked_softmax};

const CudaPart* announced = nullptr;

}  // namespace

const Engine& engine_of(Device device) {
  // The operators are registered for these two kinds of device alone.
  return device.type == aoti_torch_device_type_cpu() ? kCpuEngine : announced->engine;
}

const CudaPart* cuda_part() { return announced; }

AnnounceCudaPart::AnnounceCudaPart(const CudaPart& part) { announced = &part; }

}  // namespace selfattn::ops
