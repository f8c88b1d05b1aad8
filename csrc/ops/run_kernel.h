// Runs a CPU kernel on the framework's threads, and translates its exceptions.
#pragma once

#include <stdexcept>

#include "../core/sequences.h"
#include "../cpu/parallel.h"
#include "checks.h"

namespace selfattn::ops {

// The framework's thread pool with its current number of threads (torch.set_num_threads).
cpu::ThreadPool thread_pool();

// The same pool, limited to the threads that are worth waking for so much work.
cpu::ThreadPool thread_pool(double nanoseconds);

// Returns about how long one thread takes for a forward, or less.
double nanoseconds_of(const AttentionParams& p);
template <class Params>
double nanoseconds_of(const Params& p) {
  return static_cast<double>(p.batch * p.heads * p.queries) * static_cast<double>(p.keys);
}

// How many forwards a call with these results takes as long as.
template <class... Results>
constexpr double kForwards = 1.0;
template <class... Results>
constexpr double kForwards<BackwardArguments, Results...> = 2.5;

// Calls kernel(params, results..., thread_pool(...)). Kernels allocate nothing but scratch memory, so
// bad_alloc means that there was not enough of it.
template <class Kernel, class Params, class... Results>
void run_kernel(Kernel kernel, const Params& params, const Results&... results) {
  try {
    kernel(params, results..., thread_pool(nanoseconds_of(params) * kForwards<Results...>));
  } catch (const std::bad_alloc&) {
    throw AllocationFailure("not enough memory for the kernel's working space");
  } catch (const std::length_error&) {
    throw AllocationFailure("the kernel's working space would be larger than memory can address");
  }
}

}  // namespace selfattn::ops
