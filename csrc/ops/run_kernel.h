// The last step of an op: the framework's threads, and the kernel's exceptions.
#pragma once

#include <stdexcept>

#include "../cpu/parallel.h"
#include "checks.h"

namespace selfattn::ops {

// The framework's thread pool with its current number of threads (torch.set_num_threads).
cpu::ThreadPool thread_pool();

// As many of them as it is worth waking for so many scores.
cpu::ThreadPool thread_pool(double scores);

// Calls kernel(params, results..., thread_pool(...)). Kernels allocate scratch only: bad_alloc has one
// meaning.
template <class Kernel, class Params, class... Results>
void run_kernel(Kernel kernel, const Params& params, const Results&... results) {
  const double scores =
      static_cast<double>(params.batch * params.heads * params.queries) * static_cast<double>(params.keys);
  try {
    kernel(params, results..., thread_pool(scores));
  } catch (const std::bad_alloc&) {
    throw AllocationFailure("not enough memory for the kernel's working space");
  } catch (const std::length_error&) {
    throw AllocationFailure("the kernel's working space would be larger than memory can address");
  }
}

}  // namespace selfattn::ops
