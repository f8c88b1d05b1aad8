// A batch whose elements have lengths of their own, as one list of work items: a task for each element, and
// the items of all of them one after another.
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

// The numbers of the elements with least .. most queries. Those with the most work come first, for the
// threads to end together: what they begin last is short.
std::vector<int64_t> elements_by_work(const AttentionParams& p, int64_t least, int64_t most);

// The calls of those. Results are what a kernel is told beside the parameters, such as ForwardOutputs.
template <class Results>
std::vector<ElementCall<Results>> element_calls(const AttentionParams& p, const Results& results,
                                                int64_t least, int64_t most);

// Reorders calls; of the same number of queries they stay in their order.
void most_queries_first(std::vector<ElementCall<BackwardArguments>>& calls);

// Tasks for for_each_item, joined. Within a task items keep their order, so that one may still wait for a
// lower one. Scratch is that of the task that needs the most bytes, and must do for the others: either no
// part of it is smaller than theirs, or it is laid out anew for every item.
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
  std::vector<int64_t> ends;  // how many items the tasks up to each one have

  const Task& largest() const {
    return *std::max_element(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
      return Task::Scratch::bytes(a) < Task::Scratch::bytes(b);
    });
  }
};

// The joint task of calls, each of which is Task(params, results, more...). The calls must outlive it.
template <class Task, class Results, class... More>
JointTask<Task> joint_task(const std::vector<ElementCall<Results>>& calls, const More&... more) {
  std::vector<Task> tasks;
  tasks.reserve(calls.size());
  for (const ElementCall<Results>& call : calls) tasks.emplace_back(call.params, call.results, more...);
  return JointTask<Task>(std::move(tasks));
}

}  // namespace selfattn::cpu
