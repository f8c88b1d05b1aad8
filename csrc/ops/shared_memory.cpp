// Searches for elements that two tensors have in common.
#include "shared_memory.h"

#include <algorithm>

namespace selfattn::ops {

namespace {

// How many steps a search may take. Views of one tensor with the same strides take only about two steps for
// each dimension.
constexpr int kMostSteps = 1000;

// The differences in memory that one stride can make: numbers from least to most, times stride.
struct Term {
  int64_t stride, least, most;
  int64_t low, high;  // the smallest and largest sum of this term and those of smaller strides
};

int64_t divide_down(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

class Search {
 public:
  // Adds the dimensions of a tensor; `sign` is 1 or -1.
  void add(const Input& input, int sign) {
    for (int64_t d = 0; d < input.rank; ++d) {
      const int64_t reach = input.size[d] - 1;
      if (reach == 0 || input.stride[d] == 0) continue;
      Term* term = std::find_if(terms_, terms_ + count_,
                                [&](const Term& other) { return other.stride == input.stride[d]; });
      if (term == terms_ + count_) {
        if (count_ == kMaxTerms) {
          too_long_ = true;
          return;
        }
        terms_[count_++] = Term{input.stride[d], 0, 0, 0, 0};
      }
      (sign > 0 ? term->most : term->least) += sign * reach;
    }
  }

  // Whether the terms can add up to `sum`, or the search would take too long.
  bool finds(int64_t sum) {
    if (too_long_) return true;
    std::sort(terms_, terms_ + count_, [](const Term& a, const Term& b) { return a.stride > b.stride; });
    int64_t low = 0, high = 0;
    for (int n = count_ - 1; n >= 0; --n) {
      terms_[n].low = low += terms_[n].least * terms_[n].stride;
      terms_[n].high = high += terms_[n].most * terms_[n].stride;
    }
    return finds(sum, 0);
  }

 private:
  bool finds(int64_t sum, int n) {
    if (n == count_) return sum == 0;
    const Term& term = terms_[n];
    if (sum < term.low || sum > term.high) return false;
    const int64_t low = n + 1 < count_ ? terms_[n + 1].low : 0;
    const int64_t high = n + 1 < count_ ? terms_[n + 1].high : 0;
    // Only for these factors can the smaller strides make up the rest.
    const int64_t first = std::max(term.least, -divide_down(high - sum, term.stride));
    const int64_t last = std::min(term.most, divide_down(sum - low, term.stride));
    for (int64_t factor = first; factor <= last; ++factor) {
      if (++steps_ > kMostSteps || finds(sum - factor * term.stride, n + 1)) return true;
    }
    return false;
  }

  static constexpr int kMaxTerms = 2 * kMaxRank;
  Term terms_[kMaxTerms];
  int count_ = 0;
  int steps_ = 0;
  bool too_long_ = false;
};

}  // namespace

bool overlaps_itself(const Input& input) {
  for (int64_t d = 0; d < input.rank; ++d) {
    int64_t reached = 0;
    for (int64_t other = 0; other < input.rank; ++other) {
      if (other != d && input.size[other] > 1 && input.stride[other] <= input.stride[d]) {
        reached += (input.size[other] - 1) * input.stride[other];
      }
    }
    if (input.size[d] > 1 && reached >= input.stride[d]) return true;
  }
  return false;
}

bool may_share(const Input& left, const Input& right) {
  const char* left_data = static_cast<const char*>(left.data);
  const char* right_data = static_cast<const char*>(right.data);
  if (left.bytes == 0 || right.bytes == 0) return false;
  if (left_data + left.bytes <= right_data || right_data + right.bytes <= left_data) return false;
  const auto item = static_cast<int64_t>(aoti_torch_dtype_element_size(left.dtype_code));
  const int64_t apart = right_data - left_data;
  if (left.dtype_code != right.dtype_code || apart % item != 0) return true;
  Search search;
  search.add(left, 1);
  search.add(right, -1);
  return search.finds(apart / item);
}

bool is_columns_of(const Input& part, const Input& whole, int64_t* first) {
  const auto item = static_cast<int64_t>(aoti_torch_dtype_element_size(whole.dtype_code));
  const int64_t apart = static_cast<const char*>(part.data) - static_cast<const char*>(whole.data);
  if (part.rank != whole.rank || part.dtype_code != whole.dtype_code || apart % item != 0) return false;
  const int64_t last = whole.rank - 1;
  for (int64_t d = 0; d < last; ++d) {
    if (part.size[d] != whole.size[d]) return false;
    if (part.size[d] > 1 && part.stride[d] != whole.stride[d]) return false;
  }
  *first = apart / item;
  return apart >= 0 && *first + part.size[last] <= whole.size[last];
}

}  // namespace selfattn::ops
