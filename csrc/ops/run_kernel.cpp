// The framework's threads, and what a forked process may use of them.
#include "run_kernel.h"

#if defined(__linux__)
#include <pthread.h>
#endif

namespace selfattn::ops {

namespace {

// Note [Forked processes]
// GNU's OpenMP keeps a pool of threads for each thread that has started a parallel region. fork() copies only
// the calling thread, which still counts on its pool, although the pool's threads are gone: its next parallel
// region waits for ever, in every function of the framework that has one. A kernel needs no pool: in such a
// thread it runs on one thread. Other threads of the child make pools of their own. Whether the framework
// itself used a pool before the fork is not known here.
thread_local bool has_pool = false;
thread_local bool lost_pool = false;

#if defined(__linux__)
void after_fork_in_child() { lost_pool = lost_pool || has_pool; }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &after_fork_in_child);
#endif

struct Job {
  void (*body)(void* context);
  void* context;
};

void run_range(int64_t begin, int64_t end, void* job) {
  for (int64_t n = begin; n < end; ++n) static_cast<Job*>(job)->body(static_cast<Job*>(job)->context);
}

// There is one range per worker. Inside another parallel region the framework gives all of them to this
// thread, one after the other: the first does all the work, and the others find nothing left.
void run_on_framework_threads(int workers, void (*body)(void* context), void* context) {
  has_pool = true;
  Job job{body, context};
  if (torch_parallel_for(0, workers, 1, &run_range, &job) != TORCH_SUCCESS) {
    throw std::runtime_error("the framework's thread pool failed");
  }
}

}  // namespace

cpu::ThreadPool thread_pool() {
  uint32_t threads = 1;
  if (!lost_pool) torch_get_num_threads(&threads);
  return {static_cast<int>(threads), &run_on_framework_threads};
}

cpu::ThreadPool thread_pool(double nanoseconds) {
  constexpr double kOfAThread = 16384;  // waking a thread takes some microseconds
  cpu::ThreadPool pool = thread_pool();
  const double worth = 1.0 + nanoseconds / kOfAThread;
  if (worth < pool.threads) pool.threads = static_cast<int>(worth);
  return pool;
}

double nanoseconds_of(const AttentionParams& p) {
  // kQuery, kSequence and kScore are what each costs by itself. A number of a query or an output costs
  // kNumber, as it is transposed or rounded. A key or a value costs kRow when it is loaded, and kLoaded for
  // each byte, of a line at least; each byte costs kMet when a query meets it.
  constexpr double kQuery = 16, kSequence = 100, kScore = 1, kNumber = 3.0 / 16, kRow = 0.5,
                   kLoaded = 3.0 / 256, kLine = 64, kMet = 1.0 / 256;
  const double scores = count_of_scores(p);
  const double queries = static_cast<double>(p.batch * p.heads * p.queries);
  const double columns = static_cast<double>(p.head_dim + p.value_dim);
  const double size = static_cast<double>(size_of(p.dtype));
  const auto of_row = [&](int64_t row_columns) {
    return kRow + larger(static_cast<double>(row_columns) * size, kLine) * kLoaded;
  };
  const double rows_of_keys = scores / static_cast<double>(larger(p.queries, 1));
  return queries * (kQuery + columns * kNumber) +
         (p.sequences.any() ? static_cast<double>(p.batch) * kSequence : 0.0) +
         scores * larger(kScore, columns * size * kMet) +
         rows_of_keys * (of_row(p.head_dim) + of_row(p.value_dim));
}

}  // namespace selfattn::ops
