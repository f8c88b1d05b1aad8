// Lists the calls of a batch's elements. This is compiled once, as every instruction set needs the same list.
#include "joint_task.h"

namespace selfattn::cpu {

std::vector<int64_t> elements_by_work(const AttentionParams& p, int64_t least, int64_t most) {
  struct Element {
    int64_t number, work;
  };
  least = std::max(least, p.sequences.least_queries);
  most = std::min(most, p.sequences.most_queries);
  std::vector<Element> elements;
  elements.reserve(static_cast<size_t>(p.batch));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t queries = queries_of(p, b).count, keys = keys_of(p, b).count;
    if (keys < p.sequences.least_keys) continue;
    if (queries >= least && queries <= most) elements.push_back({b, queries * keys});
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

template std::vector<ElementCall<ForwardOutputs>> element_calls(const AttentionParams&, const ForwardOutputs&,
                                                                int64_t, int64_t);
template std::vector<ElementCall<WeightsOutputs>> element_calls(const AttentionParams&, const WeightsOutputs&,
                                                                int64_t, int64_t);
template std::vector<ElementCall<WeightSums>> element_calls(const AttentionParams&, const WeightSums&,
                                                            int64_t, int64_t);
template std::vector<ElementCall<BackwardArguments>> element_calls(const AttentionParams&,
                                                                   const BackwardArguments&, int64_t,
                                                                   int64_t);
template std::vector<ElementCall<JvpArguments>> element_calls(const AttentionParams&, const JvpArguments&,
                                                              int64_t, int64_t);
template std::vector<ElementCall<BackwardBackwardArguments>> element_calls(const AttentionParams&,
                                                                           const BackwardBackwardArguments&,
                                                                           int64_t, int64_t);

void most_queries_first(std::vector<ElementCall<BackwardArguments>>& calls) {
  using Call = ElementCall<BackwardArguments>;
  std::stable_sort(calls.begin(), calls.end(),
                   [](const Call& a, const Call& b) { return a.params.queries > b.params.queries; });
}

}  // namespace selfattn::cpu
