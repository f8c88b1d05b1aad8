// One list of work items for a batch whose elements differ in length. Each element has a task, and the items
// of all tasks follow one another.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../core/tangents.h"
#include "parallel.h"

namespace selfattn::cpu {

constexpr int64_t kAnyQueries = INT64_MAX;

// The call of one batch element.
template <class Results>
struct ElementCall {
  AttentionParams params;
  Results results;
};

// Returns the numbers of the elements with `least` to `most` queries. Elements with the most work come first,
// so that the threads end together: the items that they begin last are short.
std::vector<int64_t> elements_by_work(const AttentionParams& p, int64_t least, int64_t most);

// Returns the calls of these elements. `Results` is what a kernel gets beside the parameters, such as
// ForwardOutputs.
template <class Results>
std::vector<ElementCall<Results>> element_calls(const AttentionParams& p, const Results& results,
                                                int64_t least, int64_t most);

// Sorts calls by their number of queries, largest first. Calls with equally many keep their order.
void most_queries_first(std::vector<ElementCall<BackwardArguments>>& calls);

// A task for for_each_item that joins several. Within each of them items keep their order, so that an item
// may still wait for a lower one. A worker's scratch is that of the task that needs the most bytes, and must
// serve the others: either no part of it is smaller than theirs, or every item lays it out anew.
template <class Task>
class JointTask {
 public:
  explicit JointTask(std::vector<Task> joined) : tasks(std::move(joined)) {
    ends.reserve(tasks.size());
    for (const Task& task : tasks) ends.push_back(items() + task.items());
  }
  int64_t items() const { return ends.empty() ? 0 : ends.back(); }

  struct Scratch : Task::Scratch {
    explicit Scratch(const JointTask& joint) : Task::Scratch(joint.largest()) {}
  };

  void operator()(int64_t item, Scratch& scratch) const {
    const size_t i = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
    tasks[i](i == 0 ? item : item - ends[i - 1], scratch);
  }

 private:
  std::vector<Task> tasks;
  std::vector<int64_t> ends;  // [n]: how many items tasks 0 .. n have together

  const Task& largest() const {
    return *std::max_element(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
      return Task::Scratch::bytes(a) < Task::Scratch::bytes(b);
    });
  }
};

// Returns the joint task of calls; the task of each is Task(params, results, more...). The calls must outlive
// it.
template <class Task, class Results, class... More>
JointTask<Task> joint_task(const std::vector<ElementCall<Results>>& calls, const More&... more) {
  std::vector<Task> tasks;
  tasks.reserve(calls.size());
  for (const ElementCall<Results>& call : calls) tasks.emplace_back(call.params, call.results, more...);
  return JointTask<Task>(std::move(tasks));
}

}  // namespace selfattn::cpu
