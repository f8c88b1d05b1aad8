// for_each_item: it visits every item once, and reports failures, on any number of threads.
#include "cpu/parallel.h"

#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "thread_pool.h"

using namespace selfattn;
using cpu::for_each_item;
using cpu::Items;

namespace {

struct CountTask {
  std::vector<std::atomic<int>>& counts;

  struct Scratch {
    explicit Scratch(const CountTask&) {}
  };
  void operator()(int64_t item, Scratch&) const { ++counts[static_cast<size_t>(item)]; }
};

struct ThrowingTask {
  int64_t bad_item;

  struct Scratch {
    explicit Scratch(const ThrowingTask&) {}
  };
  void operator()(int64_t item, Scratch&) const {
    if (item == bad_item) throw std::runtime_error("item failed");
  }
};

// A task whose first `failing` workers cannot allocate their scratch memory.
struct HungryTask {
  int failing;
  std::atomic<int>& started;
  std::atomic<int64_t>& done;

  struct Scratch {
    explicit Scratch(const HungryTask& task) {
      if (task.started++ < task.failing) throw std::bad_alloc();
    }
  };
  void operator()(int64_t, Scratch&) const { ++done; }
};

}  // namespace

TEST(every_item_runs_once) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const int64_t items : {0, 1, 2, 7, 255, 256, 1000, 1001}) {
      for (const Items kind : {Items::kInOrder, Items::kIndependent}) {
        std::vector<std::atomic<int>> counts(static_cast<size_t>(items));
        for_each_item(test::thread_pool(threads), items, CountTask{counts}, kind);
        for (const auto& count : counts) CHECK_FOR(count == 1, std::to_string(threads) + " threads");
      }
    }
  }
}

TEST(small_items_are_claimed_several_at_a_time) {
  CHECK(cpu::items_per_claim(Items::kIndependent, 256, 2) == 8);
  CHECK(cpu::items_per_claim(Items::kIndependent, 255, 2) == 7);
  CHECK(cpu::items_per_claim(Items::kIndependent, 31, 2) == 1);
  CHECK(cpu::items_per_claim(Items::kIndependent, 100000, 2) == 8);
  CHECK(cpu::items_per_claim(Items::kInOrder, 100000, 2) == 1);
}

TEST(a_pool_that_runs_bodies_one_after_the_other_is_enough) {
  std::vector<std::atomic<int>> counts(10);
  for_each_item(test::serial_pool(4), 10, CountTask{counts});
  for (const auto& count : counts) CHECK(count == 1);
}

TEST(an_exception_of_any_item_arrives) {
  for (const int threads : {1, 3}) {
    for (const int64_t bad_item : {0, 5, 9}) {
      CHECK_THROWS(for_each_item(test::thread_pool(threads), 10, ThrowingTask{bad_item}), std::runtime_error,
                   "item failed");
    }
  }
}

TEST(workers_that_cannot_allocate_leave_their_share_to_others) {
  std::atomic<int> started{0};
  std::atomic<int64_t> done{0};
  for_each_item(test::thread_pool(4), 100, HungryTask{3, started, done});
  CHECK(done == 100);
}

TEST(allocation_failure_of_all_workers_arrives) {
  for (const int threads : {1, 4}) {
    std::atomic<int> started{0};
    std::atomic<int64_t> done{0};
    CHECK_THROWS(for_each_item(test::thread_pool(threads), 100, HungryTask{100, started, done}),
                 std::bad_alloc, "bad_alloc");
    CHECK(done == 0);
  }
}
