// Batch elements as one list of work items: which elements, in which order, and which items.
#include "cpu/joint_task.h"

#include <string>

#include "check.h"
#include "thread_pool.h"

using namespace selfattn;

namespace {

// Counts its items; its scratch needs as many bytes as it has items.
struct ListedTask {
  int64_t count;
  std::vector<std::atomic<int>>& times;
  std::atomic<bool>& too_small;

  ListedTask(const AttentionParams& p, const ForwardOutputs&, std::vector<std::atomic<int>>& of_items,
             std::atomic<bool>& failed)
      : count(p.queries), times(of_items), too_small(failed) {}
  int64_t items() const { return count; }

  struct Scratch {
    int64_t size;
    static int64_t bytes(const ListedTask& task) { return task.count; }
    explicit Scratch(const ListedTask& task) : size(bytes(task)) {}
  };
  void operator()(int64_t item, Scratch& scratch) const {
    ++times[static_cast<size_t>(item)];
    if (item >= count || scratch.size < count) too_small = true;
  }
};

// Packed sequences. The parameters point into this structure.
struct Packed {
  std::vector<int64_t> query_starts = {0}, key_starts = {0};
  AttentionParams p;

  explicit Packed(const std::vector<std::pair<int64_t, int64_t>>& lengths) {
    for (const auto& [queries, keys] : lengths) {
      query_starts.push_back(query_starts.back() + queries);
      key_starts.push_back(key_starts.back() + keys);
      p.queries = std::max(p.queries, queries);
      p.keys = std::max(p.keys, keys);
    }
    p.batch = static_cast<int64_t>(lengths.size());
    p.heads = p.kv_heads = 1;
    p.sequences.query_starts = query_starts.data();
    p.sequences.key_starts = key_starts.data();
    p.sequences.query_rows = query_starts.back();
    p.sequences.key_rows = key_starts.back();
  }
};

}  // namespace

TEST(elements_with_the_most_work_come_first) {
  Packed packed({{3, 5}, {100, 1}, {0, 9}, {5, 3}, {7, 0}, {30, 30}});
  using Numbers = std::vector<int64_t>;
  CHECK(cpu::elements_by_work(packed.p, 0, cpu::kAnyQueries) == (Numbers{5, 1, 0, 3, 2, 4}));
  CHECK(cpu::elements_by_work(packed.p, 1, 5) == (Numbers{0, 3}));
  CHECK(cpu::elements_by_work(packed.p, 6, cpu::kAnyQueries) == (Numbers{5, 1, 4}));
  packed.p.sequences.most_queries = 5;
  CHECK(cpu::elements_by_work(packed.p, 1, cpu::kAnyQueries) == (Numbers{0, 3}));
  CHECK(cpu::element_calls(packed.p, ForwardOutputs{}, 1, cpu::kAnyQueries)[1].params.queries == 5);
  packed.p.sequences.least_queries = 4;
  CHECK(cpu::elements_by_work(packed.p, 1, cpu::kAnyQueries) == (Numbers{3}));
  CHECK(cpu::elements_by_work(packed.p, 5, 100) == (Numbers{3}));
}

TEST(elements_with_the_most_queries_come_first_for_a_mask_that_they_share) {
  const Packed packed({{3, 90}, {7, 1}, {0, 9}, {7, 30}, {30, 2}});
  auto calls = cpu::element_calls(packed.p, BackwardArguments{}, 0, cpu::kAnyQueries);
  cpu::most_queries_first(calls);
  std::vector<std::pair<int64_t, int64_t>> lengths;
  for (const auto& call : calls) lengths.emplace_back(call.params.queries, call.params.keys);
  CHECK(lengths == (std::vector<std::pair<int64_t, int64_t>>{{30, 2}, {7, 30}, {7, 1}, {3, 90}, {0, 9}}));
}

TEST(every_item_of_every_task_runs_once_with_room_for_all) {
  const Packed packed({{3, 5}, {0, 9}, {100, 1}, {5, 3}, {1, 1}});
  const auto calls = cpu::element_calls(packed.p, ForwardOutputs{}, 0, cpu::kAnyQueries);
  for (const int threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> times(100);
    std::atomic<bool> too_small{false};
    std::vector<ListedTask> tasks;
    for (const auto& call : calls) tasks.emplace_back(call.params, call.results, times, too_small);
    const cpu::JointTask<ListedTask> joint(std::move(tasks));
    CHECK(joint.items() == 109);
    for_each_item(test::thread_pool(threads), joint.items(), joint);
    for (size_t item = 0; item < times.size(); ++item) {
      const int tasks_with_it = 1 + (item < 5) + (item < 3) + (item < 1);
      CHECK_FOR(times[item] == tasks_with_it, "item " + std::to_string(item));
    }
    CHECK(!too_small);
  }
}

TEST(nothing_to_do_is_no_work) {
  const Packed packed({{0, 9}, {0, 0}});
  CHECK(cpu::element_calls(packed.p, ForwardOutputs{}, 1, cpu::kAnyQueries).empty());
  const cpu::JointTask<ListedTask> joint{std::vector<ListedTask>{}};
  CHECK(joint.items() == 0);
  for_each_item(test::thread_pool(2), joint.items(), joint);
}
