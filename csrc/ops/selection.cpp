// The lists of selected keys: sorted_selection makes them out of what a user chose, and add_selection checks
// those that a call of attention was given.
#include <algorithm>
#include <atomic>
#include <vector>

#include "../core/sequences.h"
#include "attention_arguments.h"
#include "operators.h"
#include "run_kernel.h"

namespace selfattn::ops {

namespace {

// The lowest of the places where threads find something wrong. It does not depend on which finds it first.
class FirstWrong {
 public:
  explicit FirstWrong(int64_t end) : place_(end) {}

  void add(int64_t place) {
    for (int64_t known = place_; place < known && !place_.compare_exchange_weak(known, place);) {
    }
  }
  int64_t place() const { return place_; }

 private:
  std::atomic<int64_t> place_;
};

// Returns how many neighbouring rows a thread takes at a time: their numbers take it some microseconds.
int64_t rows_per_item(int64_t row_length) { return divide_up(8192, larger(row_length, 1)); }

// Whether numbers ascend from 0 to below `blocks`, with negative ones behind them. It tests all of them
// without a branch, so that compilers make vectors of the loop.
bool is_list(const int32_t* numbers, int64_t count, int64_t blocks) {
  const auto end = static_cast<int32_t>(blocks);
  bool good = count == 0 || numbers[0] < end;
  for (int64_t i = 1; i < count; ++i) {
    const int32_t before = numbers[i - 1], number = numbers[i];
    good &= (number < 0) | ((before >= 0) & (before < number) & (number < end));
  }
  return good;
}

// Neighbouring lists of the same sequence.
struct Lists {
  const int32_t* first;
  int64_t rows, blocks;

  // Returns the first number that is wrong, or null. What stands behind a negative one does not count.
  const int32_t* wrong_number(int64_t longest) const {
    for (const int32_t* list = first; list != first + rows * longest; list += longest) {
      if (is_list(list, longest, blocks)) continue;
      int64_t last = -1;
      for (int64_t i = 0; i < longest && list[i] >= 0; last = list[i++]) {
        if (list[i] <= last || list[i] >= blocks) return list + i;
      }
    }
    return nullptr;
  }
};

// Returns the lists of all elements of the batch, whose keys may differ in number, in parts for threads.
std::vector<Lists> lists_of(const AttentionParams& p) {
  const Selection& s = p.selection;
  const bool packed = p.sequences.query_starts != nullptr;
  const int64_t elements = p.sequences.any() || s.stride[0] != 0 ? p.batch : smaller(p.batch, 1);
  const int64_t most = rows_per_item(s.longest);
  std::vector<Lists> lists;
  for (int64_t b = 0; b < elements; ++b) {
    const PackedRows rows = packed ? queries_of(p, b) : PackedRows{0, s.rows};
    const int64_t blocks = divide_up(keys_of(p, b).count, s.key_size);
    for (int64_t head = 0; head < p.heads; head += s.heads_per_list) {
      for (int64_t row = 0; row < rows.count; row += most) {
        lists.push_back({s.row(b, head, rows.first + row), smaller(most, rows.count - row), blocks});
      }
    }
  }
  return lists;
}

// The task of checking lists, for for_each_item.
struct ListCheck {
  const std::vector<Lists>& lists;
  int64_t longest;
  FirstWrong& wrong;

  struct Scratch {
    explicit Scratch(const ListCheck&) {}
  };
  void operator()(int64_t item, Scratch&) const {
    if (lists[static_cast<size_t>(item)].wrong_number(longest) != nullptr) wrong.add(item);
  }
};

// Checks lists on the CPU. Those on a GPU are not read here: kernels leave out what is not there.
void check_lists(const AttentionParams& p) {
  constexpr double kNanoseconds = 0.25;  // of a number
  const Selection& s = p.selection;
  const std::vector<Lists> lists = lists_of(p);
  double rows = 0;
  for (const Lists& each : lists) rows += static_cast<double>(each.rows);
  const auto items = static_cast<int64_t>(lists.size());
  FirstWrong wrong(items);
  cpu::for_each_item(thread_pool(rows * static_cast<double>(s.longest) * kNanoseconds), items,
                     ListCheck{lists, s.longest, wrong}, cpu::Items::kIndependent);
  if (wrong.place() == items) return;
  const Lists& found = lists[static_cast<size_t>(wrong.place())];
  const int32_t* number = found.wrong_number(s.longest);
  const int64_t place = number - s.lists;
  refuse("selection must hold ascending numbers from 0 to ", found.blocks - 1,
         " and -1 behind them, but row ", place / s.longest, " has ", *number, " after ",
         place % s.longest > 0 ? number[-1] : -1);
}

// Sorts numbers and leaves out those that are repeated. Returns the new end.
int32_t* sort_by_comparing(int32_t* begin, int32_t* end) {
  std::sort(begin, end);
  return std::unique(begin, end);
}

// Does the same by marking the numbers among all blocks. `marks` are 0 before and after.
int32_t* sort_by_marking(int32_t* begin, int32_t* end, int64_t blocks, std::vector<uint64_t>& marks) {
  marks.resize(static_cast<size_t>(divide_up(blocks, 64)));
  for (const int32_t* number = begin; number != end; ++number) {
    marks[static_cast<size_t>(*number / 64)] |= uint64_t{1} << (*number % 64);
  }
  for (size_t word = 0; word < marks.size(); ++word) {
    for (uint64_t bits = marks[word]; bits != 0; bits &= bits - 1) {
      *begin++ = static_cast<int32_t>(word * 64) + __builtin_ctzll(bits);
    }
    marks[word] = 0;
  }
  return begin;
}

// The task of making lists out of a user's indices, for for_each_item.
template <class Index>
struct ListMaking {
  const Input& indices;
  int64_t blocks;
  int32_t* lists;
  FirstWrong& wrong;  // places among all indices

  struct Scratch {
    std::vector<uint64_t> marks;
    explicit Scratch(const ListMaking&) {}
  };
  int64_t rows() const { return indices.size[0] * indices.size[1] * indices.size[2]; }

  const Index* row_of_user(int64_t row) const {
    const int64_t head = row / indices.size[2];
    return static_cast<const Index*>(indices.data) + head / indices.size[1] * indices.stride[0] +
           head % indices.size[1] * indices.stride[1] + row % indices.size[2] * indices.stride[2];
  }
  Index index(int64_t place) const {
    return row_of_user(place / indices.size[3])[place % indices.size[3] * indices.stride[3]];
  }

  void operator()(int64_t item, Scratch& scratch) const {
    const int64_t most = rows_per_item(indices.size[3]), end = smaller((item + 1) * most, rows());
    for (int64_t row = item * most; row < end; ++row) make(row, scratch.marks);
  }
  void make(int64_t row, std::vector<uint64_t>& marks) const {
    const int64_t count = indices.size[3], stride = indices.stride[3];
    const Index* const from = row_of_user(row);
    int32_t *const list = lists + row * count, *end = list;
    int64_t last = -1;
    bool ascends = true;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t number = static_cast<int64_t>(from[i * stride]);
      if (number == -1) continue;
      if (number < 0 || number >= blocks) return wrong.add(row * count + i);
      ascends &= number > last;
      last = number;
      *end++ = static_cast<int32_t>(number);
    }
    // Marking walks through all blocks, which only rows with enough numbers pay for.
    const bool many = blocks <= 512 * (end - list);
    if (!ascends) end = many ? sort_by_marking(list, end, blocks, marks) : sort_by_comparing(list, end);
    std::fill(end, list + count, -1);
  }
};

template <class Index>
void make_lists(const Input& indices, int64_t blocks, int32_t* lists) {
  const int64_t numbers = indices.size[0] * indices.size[1] * indices.size[2] * indices.size[3];
  if (numbers == 0) return;
  FirstWrong wrong(numbers);
  const ListMaking<Index> task{indices, blocks, lists, wrong};
  cpu::for_each_item(thread_pool(static_cast<double>(numbers)),  // a nanosecond for each, or more
                     divide_up(task.rows(), rows_per_item(indices.size[3])), task, cpu::Items::kIndependent);
  if (wrong.place() == numbers) return;
  refuse("an index of a selected key or block must lie between 0 and ", blocks - 1,
         ", or be -1 for none, but row ", wrong.place() / indices.size[3], " has ",
         task.index(wrong.place()));
}

}  // namespace

void add_selection(AttentionParams& p, const Input& query, const Options& options) {
  if (!options.selection) {
    if (options.selection_size) refuse("selection_size was given without selection");
    return;
  }
  const bool host = on_host(query.device);
  const Input lists = inspect("selection", options.selection, query);
  if (lists.dtype_code != dtype_codes().int32) {
    refuse("selection must be int32, but it is ", dtype_text(lists.dtype_code));
  }
  check_rank(lists, 4);
  if (!is_contiguous(lists)) refuse("selection must be contiguous");
  if (!options.selection_size || options.selection_size->size() != 2) {
    refuse("selection_size must be given with selection: the queries of a row and the keys of a block");
  }
  const int64_t queries = (*options.selection_size)[0], keys = (*options.selection_size)[1];
  constexpr int64_t kMostSize = int64_t{1} << 30;
  if (queries < 1 || keys < 1 || queries > kMostSize || keys > kMostSize) {
    refuse("selection_size must be two numbers from 1 to 2^30, but they are ", queries, " and ", keys);
  }
  const bool packed = p.sequences.query_starts != nullptr;
  if (packed && queries != 1) refuse("packed queries do not share lists, but a row is for ", queries);
  const int64_t rows = packed ? query_rows(p) : divide_up(p.queries, queries), heads = lists.size[1];
  const bool shared = heads == 1 || heads == p.kv_heads || heads == p.heads;
  const int64_t batch = query_batch(p);
  if ((lists.size[0] != 1 && lists.size[0] != batch) || !shared || lists.size[2] != rows) {
    refuse("selection must have the shape (1 or ", batch, ", 1, ", p.kv_heads, " or ", p.heads, ", ", rows,
           ", any), but its shape is ", shape_text(lists.size, lists.rank));
  }
  if (p.keys > INT32_MAX) refuse("selected keys are at most 2^31 - 1, but there are ", p.keys);
  // Lists without numbers have no memory, but they hide all keys.
  static constexpr int32_t kNothing = -1;
  p.selection.lists = lists.data != nullptr ? static_cast<const int32_t*>(lists.data) : &kNothing;
  p.selection.rows = rows;
  p.selection.longest = lists.size[3];
  p.selection.query_size = queries;
  p.selection.key_size = keys;
  p.selection.heads_per_list = heads > 0 ? std::max<int64_t>(p.heads / heads, 1) : 1;
  p.selection.stride[1] = heads == 1 ? 0 : rows * lists.size[3];
  p.selection.stride[0] = lists.size[0] == 1 ? 0 : heads * rows * lists.size[3];
  if (host) check_lists(p);
}

void check_selected(const AttentionParams& p, const ForwardOutputs& outputs) {
  if (p.selection.lists == nullptr || outputs.row_mean == nullptr) return;
  refuse("selection was given to attention_statistics");
}

void check_selected(const AttentionParams& p, const BackwardArguments& a) {
  const bool others = a.grad_mask.data != nullptr || a.grad_weights.data != nullptr ||
                      a.grad_mean != nullptr || a.grad_keys != nullptr || a.grad_sink != nullptr;
  if (p.selection.lists == nullptr || !others) return;
  refuse("with selection there are no gradients of masks, of weights and of statistics");
}

void sorted_selection(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const TensorHandle handle = stack.tensor();
  const int64_t blocks = stack.integer();
  const Input given = inspect("indices", handle);
  if (!on_host(given.device)) refuse("sorted_selection is for tensors of the CPU");
  check_rank(given, 4);
  const bool narrow = given.dtype_code == dtype_codes().int32;
  if (!narrow && given.dtype_code != dtype_codes().int64) {
    refuse("indices must be int32 or int64, but they are ", dtype_text(given.dtype_code));
  }
  if (blocks < 0 || blocks > INT32_MAX) refuse("there cannot be ", blocks, " keys or blocks to select");
  Output lists = allocate_int32("the sorted selection",
                                {given.size[0], given.size[1], given.size[2], given.size[3]}, given.device);
  auto* const to = static_cast<int32_t*>(lists.data);
  narrow ? make_lists<int32_t>(given, blocks, to) : make_lists<int64_t>(given, blocks, to);
  stack.put(lists.handle);
}

}  // namespace selfattn::ops
