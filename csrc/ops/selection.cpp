// The lists of selected keys: sorted_selection makes them out of what a user chose, and add_selection checks
// those that a call of attention was given.
#include <algorithm>
#include <vector>

#include "../core/sequences.h"
#include "attention_arguments.h"
#include "operators.h"

namespace selfattn::ops {

namespace {

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

// Checks `rows` neighbouring lists. Those on a GPU are not read here: kernels leave out what is not there.
void check_lists(const Selection& selection, const int32_t* first, int64_t rows, int64_t blocks) {
  for (const int32_t* list = first; list != first + rows * selection.longest; list += selection.longest) {
    if (is_list(list, selection.longest, blocks)) continue;
    int64_t last = -1;
    for (int64_t i = 0; i < selection.longest && list[i] >= 0; ++i) {
      if (list[i] <= last || list[i] >= blocks) {
        refuse("selection must hold ascending numbers from 0 to ", blocks - 1,
               " and -1 behind them, but row ", (list - selection.lists) / selection.longest, " has ",
               list[i], " after ", last);
      }
      last = list[i];
    }
  }
}

// Checks the lists of all elements of the batch, whose keys may differ in number.
void check_lists(const AttentionParams& p) {
  const Selection& s = p.selection;
  const bool packed = p.sequences.query_starts != nullptr;
  const int64_t elements = p.sequences.any() || s.stride[0] != 0 ? p.batch : smaller(p.batch, 1);
  for (int64_t b = 0; b < elements; ++b) {
    const PackedRows rows = packed ? queries_of(p, b) : PackedRows{0, s.rows};
    for (int64_t head = 0; head < p.heads; head += s.heads_per_list) {
      check_lists(s, s.row(b, head, rows.first), rows.count, divide_up(keys_of(p, b).count, s.key_size));
    }
  }
}

// Sorts the numbers of a row, each once, by marking them among all blocks.
class Sorter {
 public:
  explicit Sorter(int64_t blocks) : marks_(static_cast<size_t>((blocks + 63) / 64), 0) {}

  template <class Index>
  void sort(const Index* from, int64_t stride, int64_t count, int64_t blocks, int32_t* to) {
    int64_t first = static_cast<int64_t>(marks_.size()), end = 0, length = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t number = static_cast<int64_t>(from[i * stride]);
      if (number == -1) continue;
      if (number < 0 || number >= blocks) {
        refuse("an index of a selected key or block must lie between 0 and ", blocks - 1,
               ", or be -1 for none, but one is ", number);
      }
      marks_[static_cast<size_t>(number / 64)] |= uint64_t{1} << (number % 64);
      first = std::min(first, number / 64);
      end = std::max(end, number / 64 + 1);
    }
    for (int64_t word = first; word < end; ++word) {
      for (uint64_t bits = marks_[static_cast<size_t>(word)]; bits != 0; bits &= bits - 1) {
        to[length++] = static_cast<int32_t>(word * 64 + __builtin_ctzll(bits));
      }
      marks_[static_cast<size_t>(word)] = 0;
    }
    std::fill(to + length, to + count, -1);
  }

 private:
  std::vector<uint64_t> marks_;
};

}  // namespace

void add_selection(AttentionParams& p, const Input& query, const Options& options) {
  if (!options.selection) {
    if (options.selection_size) refuse("selection_size was given without selection");
    return;
  }
  const bool host = on_host(query.device);
  if (!host && options.has_lengths()) {
    refuse("on a GPU, selection was given for sequences with lengths of their own");
  }
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
  auto* to = static_cast<int32_t*>(lists.data);
  Sorter sorter(blocks);
  const int64_t count = given.size[3];
  for (int64_t b = 0; b < given.size[0] && count > 0; ++b) {
    for (int64_t h = 0; h < given.size[1]; ++h) {
      for (int64_t row = 0; row < given.size[2]; ++row, to += count) {
        const int64_t at = b * given.stride[0] + h * given.stride[1] + row * given.stride[2];
        if (narrow) {
          sorter.sort(static_cast<const int32_t*>(given.data) + at, given.stride[3], count, blocks, to);
        } else {
          sorter.sort(static_cast<const int64_t*>(given.data) + at, given.stride[3], count, blocks, to);
        }
      }
    }
  }
  stack.put(lists.handle);
}

}  // namespace selfattn::ops
