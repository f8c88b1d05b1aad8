// A batch whose elements have lengths of their own, as one list of work items: a task for each element, and
// the items of all of them one after another.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../core/sequences.h"
#include "parallel.h"

namespace selfattn::cpu {

constexpr int64_t kAnyQueries = INT64_MAX;

// The call of one batch element.
template <class Results>
struct ElementCall {
  AttentionParams params;
  Results results;  // ForwardOutputs, WeightsOutputs or BackwardArguments
};

// The numbers of the elements with least .. most queries. Those with the most work come first, for the
// threads to end together: what they begin last is short.
inline std::vector<int64_t> elements_by_work(const AttentionParams& p, int64_t least, int64_t most) {
  struct Element {
    int64_t number, work;
  };
  least = std::max(least, p.sequences.least_queries);
  most = std::min(most, p.sequences.most_queries);
  std::vector<Element> elements;
  elements.reserve(static_cast<size_t>(p.batch));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t queries = queries_of(p, b).count;
    if (queries >= least && queries <= most) elements.push_back({b, queries * keys_of(p, b).count});
  }
  const auto more_work = [](const Element& a, const Element& b) {
    return a.work != b.work ? a.work > b.work : a.number < b.number;
  };
  std::sort(elements.begin(), elements.end(), more_work);
  std::vector<int64_t> numbers;
  numbers.reserve(elements.size());
  for (const Element& element : elements) numbers.push_back(element.number);
  return numbers;
}

template <class Results>
std::vector<ElementCall<Results>> element_calls(const AttentionParams& p, const Results& results,
                                                int64_t least, int64_t most) {
  std::vector<ElementCall<Results>> calls;
  const std::vector<int64_t> elements = elements_by_work(p, least, most);
  calls.reserve(elements.size());
  for (const int64_t b : elements) calls.push_back({element_of(p, b), element_of(results, p, b)});
  return calls;
}

template <class Results>
void most_queries_first(std::vector<ElementCall<Results>>& calls) {
  std::stable_sort(calls.begin(), calls.end(),
                   [](const ElementCall<Results>& a, const ElementCall<Results>& b) {
                     return a.params.queries > b.params.queries;
                   });
}

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
