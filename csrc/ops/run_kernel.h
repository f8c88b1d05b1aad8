// The last step of an op: the framework's threads, and the kernel's exceptions.
#pragma once

#include <stdexcept>

#include "../cpu/parallel.h"
#include "checks.h"

namespace selfattn::ops {

// The framework's thread pool with its current number of threads (torch.set_num_threads).
cpu::ThreadPool thread_pool();

// Calls kernel(arguments..., thread_pool()). Kernels allocate scratch only: bad_alloc has one meaning.
template <class Kernel, class... Arguments>
void run_kernel(Kernel kernel, const Arguments&... arguments) {
  try {
    kernel(arguments..., thread_pool());
  } catch (const std::bad_alloc&) {
    throw AllocationFailure("not enough memory for the kernel's working space");
  } catch (const std::length_error&) {
    throw AllocationFailure("the kernel's working space would be larger than memory can address");
  }
}

}  // namespace selfattn::ops
