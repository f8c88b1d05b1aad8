// Work on threads: the caller lends a pool, and kernels hand it numbered work items.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>

#include "../core/integers.h"

namespace selfattn::cpu {

#if defined(__APPLE__) && defined(__aarch64__)
constexpr size_t kCacheLine = 128;
#else
constexpr size_t kCacheLine = 64;
#endif

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

// The workers of for_each_item share this.
struct SharedItems {
  const void* task;
  int64_t items, claim;
  // The counters have cache lines of their own: every worker reads what stands beside them, all the time.
  alignas(kCacheLine) std::atomic<int64_t> next{0};
  alignas(kCacheLine) std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  template <class Task>
  void work() {
    const Task& own = *static_cast<const Task*>(task);
    int64_t mine = 0;
    try {
      typename Task::Scratch scratch(own);
      for (int64_t item; (item = next.fetch_add(claim, std::memory_order_relaxed)) < items;) {
        for (const int64_t end = smaller(item + claim, items); item < end; ++item) {
          own(item, scratch);
          ++mine;
        }
      }
    } catch (...) {
      keep_error();
    }
    done.fetch_add(mine);
  }
  // It is not a part of work(), which is compiled for every task.
  __attribute__((noinline)) void keep_error() {
    if (!failed.exchange(true)) error = std::current_exception();
  }
};

// The part of for_each_item that is the same for every task; `body` gets the SharedItems.
__attribute__((noinline)) inline void run_items(const ThreadPool& pool, const void* task, int64_t items,
                                                Items kind, void (*body)(void* context)) {
  const int workers = static_cast<int>(smaller(items, pool.threads));
  SharedItems shared{task, items, items_per_claim(kind, items, workers)};
  if (workers <= 1) {
    body(&shared);
  } else {
    pool.run(workers, body, &shared);
  }
  // A worker that failed to allocate matters only if the others could not do its share.
  if (shared.done.load() < items) std::rethrow_exception(shared.error);
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
  if (items <= 0) return;
  run_items(pool, &task, items, kind,
            [](void* context) { static_cast<SharedItems*>(context)->template work<Task>(); });
}

}  // namespace selfattn::cpu
