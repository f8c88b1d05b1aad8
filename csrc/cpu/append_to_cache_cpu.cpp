// Copies the new rows on all threads, a block of rows of one kv head at a time.
#include "append_to_cache_cpu.h"

#include <algorithm>
#include <cstring>

namespace selfattn::cpu {

namespace {

// Rows of one kv head that a work item copies: enough to be worth claiming, few enough to share a long
// prompt.
constexpr int64_t kRowsOfAnItem = 128;

struct Rows {
  const View* from;
  const View* to;
  int64_t bytes;  // bytes of one row
};

void copy_rows(const Rows& rows, int64_t from, int64_t to, int64_t count) {
  const int64_t size = size_of(rows.from->dtype);
  const char* source = static_cast<const char*>(rows.from->data) + from * size;
  char* target = static_cast<char*>(rows.to->data) + to * size;
  const int64_t source_stride = rows.from->stride[2] * size;
  const int64_t target_stride = rows.to->stride[2] * size;
  if (rows.bytes == 0) return;
  if (source_stride == rows.bytes && target_stride == rows.bytes) {
    std::memcpy(target, source, static_cast<size_t>(count * rows.bytes));
    return;
  }
  for (int64_t r = 0; r < count; ++r) {
    std::memcpy(target + r * target_stride, source + r * source_stride, static_cast<size_t>(rows.bytes));
  }
}

// An item is a block of rows of one kv head of one sequence, keys and values.
struct Task {
  struct Scratch {
    explicit Scratch(const Task&) {}
  };

  const AppendParams& append;
  int64_t blocks;

  void operator()(int64_t item, Scratch&) const {
    const AppendParams& a = append;
    const int64_t block = item % blocks;
    const int64_t head = item / blocks % a.kv_heads;
    const int64_t b = item / blocks / a.kv_heads;
    const int64_t size = size_of(a.dtype);
    const int64_t end = std::min(a.rows_of(b), (block + 1) * kRowsOfAnItem);
    const int64_t position = a.first_position(b);
    const int64_t source_batch = a.row_starts == nullptr ? b : 0;
    const int64_t source_row = a.row_starts == nullptr ? 0 : a.row_starts[b];
    const Rows both[] = {{&a.key, &a.key_cache, a.head_dim * size},
                         {&a.value, &a.value_cache, a.value_dim * size}};
    for (int64_t r = block * kRowsOfAnItem; r < end;) {
      // Copies as many rows as lie in one page.
      const int64_t place = position + r;
      const int64_t page_size = a.pages.table == nullptr ? a.capacity : a.pages.size;
      const int64_t target_batch =
          a.pages.table == nullptr ? b : a.pages.table[b * a.pages.stride + place / page_size];
      const int64_t count = std::min(end - r, page_size - place % page_size);
      for (const Rows& rows : both) {
        copy_rows(rows, rows.from->offset(source_batch, head, source_row + r),
                  rows.to->offset(target_batch, head, place % page_size), count);
      }
      r += count;
    }
  }
};

}  // namespace

void append_to_cache(const AppendParams& append, const ThreadPool& pool) {
  int64_t most = 0;
  for (int64_t b = 0; b < append.batch; ++b) most = std::max(most, append.rows_of(b));
  const int64_t blocks = divide_up(most, kRowsOfAnItem);
  for_each_item(pool, append.batch * append.kv_heads * blocks, Task{append, blocks});
}

}  // namespace selfattn::cpu
