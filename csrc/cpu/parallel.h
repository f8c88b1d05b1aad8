// Work on threads: the caller lends a pool, and kernels hand it numbered work items.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>

#include "../core/integers.h"

namespace selfattn::cpu {

constexpr size_t kCacheLine = 64;

// The framework's thread pool behind a function pointer, so that nothing here depends on the framework. run()
// calls body(context) `workers` times, concurrently if there are threads, and returns when all have returned.
struct ThreadPool {
  int threads = 1;
  void (*run)(int workers, void (*body)(void* context),
              void* context) = nullptr;  // nullable when threads == 1
};

// Whether items of a task may wait for lower ones.
enum class Items { kInOrder, kIndependent };

// Returns how many items a worker claims at a time. If an item takes less than a microsecond, claiming it is
// a tenth of the work or more, because the counter moves from one core's cache to another's. With sixteen
// claims per worker, of at most eight items, no worker waits long for the last claims.
inline int64_t items_per_claim(Items kind, int64_t items, int64_t workers) {
  return kind == Items::kInOrder ? 1 : larger(smaller(items / (16 * workers), 8), 1);
}

// Runs task(item, scratch) for every item in [0, items). Items are claimed in ascending order, and one by one
// if they are kInOrder, so that an item may wait for a lower one: the lower one is running or done, whatever
// the number of threads. The thread that runs an item must not change its result.
//
// Task has a type Scratch, constructed from the task once per worker before the worker claims anything: a
// worker that cannot allocate leaves its share to the others. If items stay undone, because no worker could
// allocate or because a task threw, the first exception is thrown here.
template <class Task>
void for_each_item(const ThreadPool& pool, int64_t items, const Task& task, Items kind = Items::kInOrder) {
  struct Shared {
    const Task* task = nullptr;
    int64_t items = 0, claim = 1;
    // The counters have cache lines of their own: every worker reads what stands beside them, all the time.
    alignas(kCacheLine) std::atomic<int64_t> next{0};
    alignas(kCacheLine) std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;

    void work() {
      int64_t mine = 0;
      try {
        typename Task::Scratch scratch(*task);
        for (int64_t item; (item = next.fetch_add(claim, std::memory_order_relaxed)) < items;) {
          for (const int64_t end = smaller(item + claim, items); item < end; ++item) {
            (*task)(item, scratch);
            ++mine;
          }
        }
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
      done.fetch_add(mine);
    }
    static void body(void* context) { static_cast<Shared*>(context)->work(); }
  };
  if (items <= 0) return;
  Shared shared;
  shared.task = &task;
  shared.items = items;
  const int workers = static_cast<int>(smaller(items, pool.threads));
  shared.claim = items_per_claim(kind, items, workers);
  if (workers <= 1) {
    shared.work();
  } else {
    pool.run(workers, &Shared::body, &shared);
  }
  // A worker that failed to allocate matters only if the others could not do its share.
  if (shared.done.load() < items) std::rethrow_exception(shared.error);
}

}  // namespace selfattn::cpu
