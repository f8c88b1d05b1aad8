// Functions of scores for test_score_functions.py, as a developer writes them. They are compiled with
// FUNCTION, one of the structures here, and NUMBER, float or double.
#include "core/score_function.h"
#include "core/score_function_math.h"

#include <cmath>
#include <limits>

using namespace selfattn;

namespace {

struct Place {
  int64_t batch, head, query, key;
};

// Where an element of a captured tensor lies, -1 beside it.
int64_t offset(const FunctionInputs& in, int tensor, int64_t first, int64_t second = 0) {
  const CapturedTensor& t = in.tensors[tensor];
  return first >= 0 && first < t.size[0] ? first * t.stride[0] + second * t.stride[1] : -1;
}

NUMBER read(const FunctionInputs& in, int tensor, int64_t offset) {
  if (offset < 0) {
    __atomic_store_n(in.out_of_range, 1, __ATOMIC_RELAXED);
    return score_function::bits_of<NUMBER>(beside_bits(NUMBER()));
  }
  return static_cast<const NUMBER*>(in.tensors[tensor].data)[offset];
}

struct Nobody {
  static bool hides(const FunctionInputs&, const Place&) { return false; }
};

// A bias for each head and distance, t[h][k - q + numbers[0]], of tensors laid out (distances, heads).
struct Bias : Nobody {
  static constexpr const char* kTensors = sizeof(NUMBER) == 4 ? "float32[2]" : "float64[2]";
  static constexpr int64_t kNumbers = 1;
  static int64_t distance(const FunctionInputs& in, const Place& at) {
    return at.key - at.query + static_cast<int64_t>(in.numbers[0]);
  }
  static NUMBER value(const FunctionInputs& in, const Place& at, NUMBER s) {
    return s + read(in, 0, offset(in, 0, distance(in, at), at.head));
  }
  static NUMBER slope(const FunctionInputs&, const Place&, NUMBER) { return 1; }
  static void captured(const FunctionInputs& in, const Place& at, NUMBER, NUMBER grad, double* const* sums) {
    sums[0][distance(in, at) * in.tensors[0].size[1] + at.head] += static_cast<double>(grad);
  }
};

// A factor for each query and head, t[q][h], and a pattern of hidden pairs that is another one for each batch
// element and head.
struct Factor {
  static constexpr const char* kTensors = Bias::kTensors;
  static constexpr int64_t kNumbers = 0;
  static bool hides(const FunctionInputs&, const Place& at) {
    return (3 * at.query + 2 * at.key + at.batch + at.head) % 7 == 0;
  }
  static NUMBER factor(const FunctionInputs& in, const Place& at) {
    return read(in, 0, offset(in, 0, at.query, at.head));
  }
  static NUMBER value(const FunctionInputs& in, const Place& at, NUMBER s) { return s * factor(in, at); }
  static NUMBER slope(const FunctionInputs& in, const Place& at, NUMBER) { return factor(in, at); }
  static void captured(const FunctionInputs& in, const Place& at, NUMBER s, NUMBER grad,
                       double* const* sums) {
    sums[0][at.query * in.tensors[0].size[1] + at.head] += static_cast<double>(s * grad);
  }
};

// s + s^2 u[k] + v[b]: what scores of all heads and queries read; the gradient of v need not be wanted.
struct Square : Nobody {
  static constexpr const char* kTensors =
      sizeof(NUMBER) == 4 ? "float32[1] float32[1]" : "float64[1] float64[1]";
  static constexpr int64_t kNumbers = 0;
  static NUMBER factor(const FunctionInputs& in, const Place& at) {
    return read(in, 0, at.key * in.tensors[0].stride[0]);
  }
  static NUMBER value(const FunctionInputs& in, const Place& at, NUMBER s) {
    return s + s * s * factor(in, at) + read(in, 1, at.batch * in.tensors[1].stride[0]) * NUMBER(at.key % 3);
  }
  static NUMBER slope(const FunctionInputs& in, const Place& at, NUMBER s) {
    return 1 + 2 * s * factor(in, at);
  }
  static void captured(const FunctionInputs&, const Place& at, NUMBER s, NUMBER grad, double* const* sums) {
    if (sums[0] != nullptr) sums[0][at.key] += static_cast<double>(s * s * grad);
    if (sums[1] != nullptr) sums[1][at.batch] += static_cast<double>(grad * NUMBER(at.key % 3));
  }
};

// Keys behind the query plus numbers[0] are hidden.
struct Causal {
  static constexpr const char* kTensors = "";
  static constexpr int64_t kNumbers = 1;
  static bool hides(const FunctionInputs& in, const Place& at) {
    return at.key > at.query + static_cast<int64_t>(in.numbers[0]);
  }
  static NUMBER value(const FunctionInputs&, const Place&, NUMBER s) { return s; }
  static NUMBER slope(const FunctionInputs&, const Place&, NUMBER) { return 1; }
  static constexpr auto captured = nullptr;
};

// Another softcap.
struct Cap : Nobody {
  static constexpr const char* kTensors = "";
  static constexpr int64_t kNumbers = 1;
  static NUMBER value(const FunctionInputs& in, const Place&, NUMBER s) {
    const auto cap = static_cast<NUMBER>(in.numbers[0]);
    return cap * std::tanh(s / cap);
  }
  static NUMBER slope(const FunctionInputs& in, const Place&, NUMBER s) {
    const NUMBER t = std::tanh(s / static_cast<NUMBER>(in.numbers[0]));
    return 1 - t * t;
  }
  static constexpr auto captured = nullptr;
};

// Numbers that softmax has to live with: +inf, NaN and -inf for some keys of some rows.
struct Wild : Nobody {
  static constexpr const char* kTensors = "";
  static constexpr int64_t kNumbers = 0;
  static NUMBER value(const FunctionInputs&, const Place& at, NUMBER s) {
    constexpr NUMBER kInfinity = std::numeric_limits<NUMBER>::infinity();
    if (at.query % 5 == 1) return -kInfinity;
    if (at.query % 5 == 2 && at.key == 3) return std::numeric_limits<NUMBER>::quiet_NaN();
    if (at.query % 5 == 3 && at.key == 4) return kInfinity;
    return s;
  }
  static NUMBER slope(const FunctionInputs&, const Place&, NUMBER) { return 1; }
  static constexpr auto captured = nullptr;
};

template <class Visit>
void for_each_score(const ScoreTile& t, const Visit& visit) {
  for (int64_t j = 0; j < t.keys; ++j) {
    for (int64_t i = 0; i < t.queries; ++i) {
      visit(Place{t.batch, t.head, t.first_query + i, t.first_key + j}, j * t.stride + i);
    }
  }
}

template <class F, bool kMasked>
void apply(const FunctionInputs* in, const ScoreTile* tile, void* scores) {
  auto* s = static_cast<NUMBER*>(scores);
  for_each_score(*tile, [&](const Place& place, int64_t at) {
    s[at] = kMasked && F::hides(*in, place) ? -std::numeric_limits<NUMBER>::infinity()
                                            : F::value(*in, place, s[at]);
  });
}

template <class F>
void differentiate(const FunctionInputs* in, const ScoreTile* tile, const void* scores, void* gradient) {
  const auto* s = static_cast<const NUMBER*>(scores);
  auto* g = static_cast<NUMBER*>(gradient);
  for_each_score(*tile, [&](const Place& place, int64_t at) {
    if (g[at] != 0) g[at] *= F::slope(*in, place, s[at]);
  });
}

template <class F>
void add_captured(const FunctionInputs* in, const ScoreTile* tile, const void* scores, const void* gradient,
                  double* const* sums) {
  if constexpr (F::kTensors[0] != '\0') {
    const auto* s = static_cast<const NUMBER*>(scores);
    const auto* g = static_cast<const NUMBER*>(gradient);
    for_each_score(*tile, [&](const Place& place, int64_t at) {
      if (g[at] != 0) F::captured(*in, place, s[at], g[at], sums);
    });
  }
}

template <class F>
constexpr ScoreFunctionTable table_of() {
  return {sizeof(NUMBER),   F::kTensors,       F::kNumbers,     &apply<F, true>,
          &apply<F, false>, &differentiate<F>, &add_captured<F>};
}

}  // namespace

extern "C" {
extern const ScoreFunctionTable selfattn_score_function_table;
const ScoreFunctionTable selfattn_score_function_table = table_of<FUNCTION>();
}
