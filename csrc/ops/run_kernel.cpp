#include "run_kernel.h"

namespace selfattn::ops {

namespace {

struct Job {
  void (*body)(void* context);
  void* context;
};

void run_range(int64_t begin, int64_t end, void* job) {
  for (int64_t n = begin; n < end; ++n) static_cast<Job*>(job)->body(static_cast<Job*>(job)->context);
}

// One range per worker. Inside another parallel region the framework hands all of them to this thread, one
// after the other: the first does all the work and the rest find nothing left.
void run_on_framework_threads(int workers, void (*body)(void* context), void* context) {
  Job job{body, context};
  if (torch_parallel_for(0, workers, 1, &run_range, &job) != TORCH_SUCCESS) {
    throw std::runtime_error("the framework's thread pool failed");
  }
}

}  // namespace

cpu::ThreadPool thread_pool() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return {static_cast<int>(threads), &run_on_framework_threads};
}

cpu::ThreadPool thread_pool(double scores) {
  // A score costs a nanosecond or less, waking a thread microseconds.
  constexpr double kScoresOfAThread = 16384;
  cpu::ThreadPool pool = thread_pool();
  const double worth = 1.0 + scores / kScoresOfAThread;
  if (worth < pool.threads) pool.threads = static_cast<int>(worth);
  return pool;
}

}  // namespace selfattn::ops
