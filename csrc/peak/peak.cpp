// Runs and times the loops of peak.h, on all threads of a pool.
#include "peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "../cpu/amx_permission.h"
#include "../cpu/cpu_features.h"

namespace selfattn::cpu {

#if defined(__x86_64__)
extern const PeakLoops kPeakAmx;
extern const PeakLoops kPeakAvx512Bf16;
extern const PeakLoops kPeakAvx512;
extern const PeakLoops kPeakAvx2;
#elif defined(__aarch64__)
extern const PeakLoops kPeakNeon;
#endif
extern const PeakLoops kPeakScalar;

namespace {

struct Entry {
  const PeakLoops* loops;
  bool present;
};

std::vector<Entry> all_loops() {
  const CpuFeatures& f = cpu_features();
  (void)f;  // unused if there is only one kind of loops
  return {
#if defined(__x86_64__)
      {&kPeakAmx, amx_unavailable_reason() == nullptr},
      {&kPeakAvx512Bf16, f.avx512_bf16},
      {&kPeakAvx512, f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl},
      {&kPeakAvx2, f.avx2 && f.fma},
#elif defined(__aarch64__)
      {&kPeakNeon, f.neon},
#endif
      {&kPeakScalar, true},
  };
}

const PeakLoops& loops_of(const std::string& isa) {
  std::string known;
  for (const Entry& entry : all_loops()) {
    if (isa == entry.loops->isa) {
      if (entry.present) return *entry.loops;
      throw std::invalid_argument("this machine lacks " + isa);
    }
    known += std::string(known.empty() ? "" : ", ") + entry.loops->isa;
  }
  throw std::invalid_argument("the peak of \"" + isa + "\" is not known; there is " + known);
}

const PeakLoops& best_reader() {
  for (const Entry& entry : all_loops()) {
    if (entry.present && entry.loops->sum != nullptr) return *entry.loops;
  }
  return kPeakScalar;
}

// Compilers would drop loops whose results go nowhere, so these are stored here; nobody reads them.
std::atomic<float> result_of_the_loops{0.0f};

// Calls share(worker, workers) once on every thread of the pool, and returns the seconds until all have
// returned.
template <class Share>
double run_once(const ThreadPool& pool, const Share& share) {
  struct Job {
    const Share* share;
    int workers;
    std::atomic<int> next{0};
    static void body(void* context) {
      Job* job = static_cast<Job*>(context);
      const float result = (*job->share)(job->next.fetch_add(1), job->workers);
      result_of_the_loops.store(result, std::memory_order_relaxed);
    }
  };
  Job job{&share, std::max(1, pool.threads)};
  const auto start = std::chrono::steady_clock::now();
  if (job.workers == 1) {
    Job::body(&job);
  } else {
    pool.run(job.workers, &Job::body, &job);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// `once` returns the seconds that it took. There are many runs even if one takes long, because on a busy
// machine most of them wait for a processor.
template <class Once>
double best_seconds(double seconds, const Once& once) {
  constexpr int kRuns = 10;
  double best = once(), spent = best;
  for (int run = 1; run < kRuns || spent < seconds; ++run) {
    const double taken = once();
    best = std::min(best, taken);
    spent += taken;
  }
  return best;
}

// Returns how many iterations take this thread kRunSeconds: long enough that waking the others does not
// count, short enough for many runs between interruptions. A run may look long because it was interrupted,
// hence the tries.
int64_t iterations_of_a_run(const PeakLoops& loops) {
  constexpr double kRunSeconds = 2e-3;
  constexpr int kTries = 3;
  const ThreadPool alone;
  for (int64_t iterations = 1 << 10;; iterations *= 2) {
    const auto share = [&](int, int) { return loops.multiply_add(iterations); };
    int long_ones = 0;
    while (long_ones < kTries && run_once(alone, share) >= kRunSeconds) ++long_ones;
    if (long_ones == kTries) return iterations;
  }
}

}  // namespace

double multiply_add_gflops(const std::string& isa, double seconds, const ThreadPool& pool) {
  const PeakLoops& loops = loops_of(isa);
  const int64_t iterations = iterations_of_a_run(loops);
  const auto share = [&](int, int) { return loops.multiply_add(iterations); };
  const double best = best_seconds(seconds, [&] { return run_once(pool, share); });
  return loops.operations * static_cast<double>(iterations) * std::max(1, pool.threads) / best / 1e9;
}

MemoryReader::MemoryReader(int64_t bytes) : count_(bytes / static_cast<int64_t>(sizeof(float))) {
  if (count_ < 1) {
    throw std::invalid_argument("bytes must be at least 4, but it is " + std::to_string(bytes));
  }
  data_.reset(new float[static_cast<size_t>(count_)]);
  // The memory is written, because pages never written are all one page of zeros, which a cache holds.
  std::fill_n(data_.get(), count_, 0.5f);
}

double MemoryReader::seconds(const ThreadPool& pool, int64_t block_bytes) const {
  const PeakLoops& loops = best_reader();
  if (block_bytes != 0) {
    const int64_t floats = block_bytes / static_cast<int64_t>(sizeof(float));
    if (block_bytes < 0 || floats % kBlockFloats != 0 || block_bytes % 4 != 0 || floats > count_) {
      throw std::invalid_argument("blocks must have a multiple of 512 bytes, at most " +
                                  std::to_string(bytes()) + ", but they have " + std::to_string(block_bytes));
    }
    std::vector<const float*> blocks;
    for (int64_t at = 0; at + floats <= count_; at += floats) blocks.push_back(data_.get() + at);
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(0));
    const auto count = static_cast<int64_t>(blocks.size());
    return run_once(pool, [&](int worker, int workers) {
      const int64_t begin = count * worker / workers, end = count * (worker + 1) / workers;
      return loops.sum_blocks(blocks.data() + begin, end - begin, floats);
    });
  }
  return run_once(pool, [&](int worker, int workers) {
    const int64_t begin = count_ * worker / workers;
    return loops.sum(data_.get() + begin, count_ * (worker + 1) / workers - begin);
  });
}

double read_gbs(int64_t bytes, double seconds, const ThreadPool& pool) {
  const MemoryReader reader(bytes);
  const double best = best_seconds(seconds, [&] { return reader.seconds(pool); });
  return static_cast<double>(reader.bytes()) / best / 1e9;
}

}  // namespace selfattn::cpu
