// Keys and values in pages, and appending to caches, on plain memory of exactly their size. Results have the
// bits of keys in slots. Entries of the table after a length are wild, and rows after it are NaN.
#include <climits>

#include "attention_case.h"
#include "check.h"
#include "core/sequences.h"
#include "cpu/append_to_cache_cpu.h"
#include "thread_pool.h"

using namespace selfattn;
using test::AttentionCase;
using test::Buffer;

namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 24, kValueDim = 17;
constexpr int64_t kLengths[] = {0, 1, 63, 64, 65, 130, 530};
constexpr int64_t kBatch = 7, kLongest = 530;

// The tables of sequences with pages of one size, in random order.
struct Table {
  int64_t size, columns, count;
  std::vector<int32_t> pages;

  explicit Table(int64_t page_size, int64_t longest = kLongest)
      : size(page_size), columns((longest + page_size - 1) / page_size), count(0) {
    pages.assign(static_cast<size_t>(kBatch * columns), 0);
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t c = 0; c < columns; ++c) {
        const bool used = c * size < std::min(kLengths[b], longest);
        pages[b * columns + c] = used ? static_cast<int32_t>(count++) : (c % 2 == 0 ? INT_MAX : -7);
      }
    }
    for (int32_t& page : pages) {
      if (page >= 0 && page < count) page = static_cast<int32_t>(count - 1 - page);
    }
  }
  Pages view() const { return {pages.data(), columns, size, count}; }
};

int64_t at(const Buffer& buffer, int64_t a, int64_t b, int64_t c, int64_t d) {
  return ((a * buffer.size()[1] + b) * buffer.size()[2] + c) * buffer.size()[3] + d;
}

// Copies the rows of a cache into pages.
Buffer in_pages(const Buffer& cache, const Table& table) {
  const int64_t dim = cache.size()[3];
  Buffer pages = Buffer(cache.dtype(), {table.count, kKvHeads, table.size, dim}).filled(NAN);
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t j = 0; j < kLengths[b]; ++j) {
      const int64_t page = table.pages[b * table.columns + j / table.size];
      for (int64_t h = 0; h < kKvHeads; ++h) {
        for (int64_t e = 0; e < dim; ++e) {
          pages.set(at(pages, page, h, j % table.size, e), cache.get(at(cache, b, h, j, e)));
        }
      }
    }
  }
  return pages;
}

struct Results {
  Buffer out, row_max, row_sum, weights;

  Results(const cpu::Kernel& kernel, AttentionParams p, int threads)
      : out(Buffer(p.dtype, {kBatch, kHeads, p.queries, kValueDim}).filled(NAN)),
        row_max(Buffer(AttentionCase::accumulation(p.dtype), {kBatch, kHeads, p.queries}).filled(NAN)),
        row_sum(row_max),
        weights(Buffer(p.dtype, {kBatch, kHeads, p.queries, p.keys}).filled(0)) {
    ForwardOutputs f;
    f.out = out.view();
    f.row_max = row_max.data();
    f.row_sum = row_sum.data();
    kernel.forward(p, f, test::thread_pool(threads));
    kernel.weights(p, {row_max.data(), row_sum.data(), weights.view()}, test::thread_pool(threads));
  }
};

bool same_bits(const Buffer& a, const Buffer& b) { return a.margins_untouched() && a.has_bits_of(b); }

// Appends new rows to each sequence: packed rows, or as many for all. The cache has slots when `page_size` is
// 0.
void check_append(DType dtype, bool packed, int64_t page_size, int threads) {
  const int64_t most_new = 140, capacity = kLongest + most_new;
  std::vector<int64_t> starts = {0}, lengths;
  for (int64_t b = 0; b < kBatch; ++b) {
    lengths.push_back(kLengths[b]);
    starts.push_back(starts.back() + (b * 67) % most_new);
  }
  const int64_t rows = packed ? starts.back() : most_new;
  Buffer key(dtype, {packed ? 1 : kBatch, kKvHeads, rows, kDim});
  Buffer value(dtype, {packed ? 1 : kBatch, kKvHeads, rows, kValueDim});
  key.put_heads_inside();
  test::Random random(7);
  random.fill(key);
  random.fill(value);
  // Every sequence may write to any of its pages.
  Table table(page_size > 0 ? page_size : capacity, capacity);
  for (size_t n = 0; n < table.pages.size(); ++n)
    table.pages[n] = static_cast<int32_t>(table.pages.size() - 1 - n);
  table.count = static_cast<int64_t>(table.pages.size());
  const int64_t batch = page_size > 0 ? table.count : kBatch,
                cache_rows = page_size > 0 ? page_size : capacity;
  Buffer key_cache = Buffer(dtype, {batch, kKvHeads, cache_rows, kDim}).filled(-3);
  Buffer value_cache = Buffer(dtype, {batch, kKvHeads, cache_rows, kValueDim}).filled(-3);
  value_cache.put_heads_inside();
  Buffer expected_key = key_cache, expected_value = value_cache;
  for (int64_t b = 0; b < kBatch; ++b) {
    const int64_t first = packed ? starts[b] : 0, count = packed ? starts[b + 1] - starts[b] : rows;
    for (int64_t n = 0; n < kKvHeads * count; ++n) {
      const int64_t h = n / count, r = n % count, place = lengths[b] + r;
      const int64_t to = page_size > 0 ? table.pages[b * table.columns + place / page_size] : b;
      const int64_t from = packed ? 0 : b, row = page_size > 0 ? place % page_size : place;
      for (int64_t e = 0; e < kDim; ++e) {
        expected_key.set(at(expected_key, to, h, row, e), key.get(at(key, from, h, first + r, e)));
      }
      for (int64_t e = 0; e < kValueDim; ++e) {
        expected_value.set(at(expected_value, to, h, row, e), value.get(at(value, from, h, first + r, e)));
      }
    }
  }
  AppendParams a;
  a.batch = kBatch;
  a.kv_heads = kKvHeads;
  a.rows = rows;
  a.capacity = page_size > 0 ? table.columns * page_size : capacity;
  a.head_dim = kDim;
  a.value_dim = kValueDim;
  a.dtype = dtype;
  a.key = key.view();
  a.value = value.view();
  a.key_cache = key_cache.view();
  a.value_cache = value_cache.view();
  a.row_starts = packed ? starts.data() : nullptr;
  // Both ways to count lengths are tested.
  a.lengths_after = threads > 1;
  for (int64_t b = 0; a.lengths_after && b < kBatch; ++b) lengths[b] += a.rows_of(b);
  a.lengths = lengths.data();
  if (page_size > 0) a.pages = table.view();
  cpu::append_to_cache(a, test::thread_pool(threads));
  const std::string what = std::string(name_of(dtype)) + (packed ? " packed, " : ", ") + "pages of " +
                           std::to_string(page_size) + ", threads " + std::to_string(threads);
  CHECK_FOR(same_bits(key_cache, expected_key), what);
  CHECK_FOR(same_bits(value_cache, expected_value), what);
}

}  // namespace

TEST(pages_change_no_bit) {
  for (const DType dtype : test::kDTypes) {
    for (const int64_t queries : {1, 4, 50}) {
      Buffer query(dtype, {kBatch, kHeads, queries, kDim});
      Buffer key(dtype, {kBatch, kKvHeads, kLongest, kDim}),
          value(dtype, {kBatch, kKvHeads, kLongest, kValueDim});
      test::Random random(3);
      for (Buffer* buffer : {&query, &key, &value}) random.fill(*buffer);
      AttentionParams p;
      p.batch = kBatch;
      p.heads = kHeads;
      p.kv_heads = kKvHeads;
      p.queries = p.rows_per_head = queries;
      p.keys = kLongest;
      p.head_dim = kDim;
      p.value_dim = kValueDim;
      p.dtype = dtype;
      p.query = query.view();
      p.key = key.view();
      p.value = value.view();
      p.scale = 0.7;
      p.window_right = 0;
      std::vector<int64_t> offsets;
      for (const int64_t length : kLengths) offsets.push_back(length - queries);
      p.sequences.key_lengths = kLengths;
      p.sequences.query_offsets = offsets.data();
      for (const cpu::Kernel* kernel : test::sequence_kernels()) {
        const Results contiguous(*kernel, p, 1);
        for (const int64_t size : {1, 7, 16, 64}) {
          const Table table(size);
          Buffer key_pages = in_pages(key, table), value_pages = in_pages(value, table);
          AttentionParams paged = p;
          paged.key = key_pages.view();
          paged.value = value_pages.view();
          paged.pages = table.view();
          for (const int threads : {1, 3}) {
            const Results got(*kernel, paged, threads);
            const std::string what = std::string(kernel->isa) + " " + name_of(dtype) + ", pages of " +
                                     std::to_string(size) + ", queries " + std::to_string(queries);
            CHECK_FOR(same_bits(got.out, contiguous.out), what);
            CHECK_FOR(same_bits(got.row_max, contiguous.row_max), what);
            CHECK_FOR(same_bits(got.row_sum, contiguous.row_sum), what);
            CHECK_FOR(same_bits(got.weights, contiguous.weights), what);
          }
        }
      }
    }
  }
}

// One sequence has more rows of queries and the other more pages. A thread that takes both has memory for
// each.
TEST(sequences_of_unlike_sizes_share_a_threads_memory) {
  const std::vector<int64_t> query_starts = {0, 4, 5}, lengths = {64, 20000};
  const int64_t heads = 8, dim = 16, page_size = 2, columns = lengths[1] / page_size;
  std::vector<int32_t> table(static_cast<size_t>(2 * columns), -1);
  int32_t pages = 0;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t c = 0; c * page_size < lengths[b]; ++c) table[b * columns + c] = pages++;
  }
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    Buffer query(dtype, {1, heads, 5, dim});
    Buffer key(dtype, {pages, 1, page_size, dim}), value(dtype, {pages, 1, page_size, dim});
    test::Random random(5);
    for (Buffer* buffer : {&query, &key, &value}) random.fill(*buffer);
    AttentionParams p;
    p.batch = 2;
    p.heads = heads;
    p.kv_heads = 1;
    p.queries = 4;
    p.keys = lengths[1];
    p.head_dim = p.value_dim = dim;
    p.rows_per_head = 5;
    p.dtype = dtype;
    p.query = query.view();
    p.query.stride[0] = 0;
    p.key = key.view();
    p.value = value.view();
    p.sequences.query_starts = query_starts.data();
    p.sequences.query_rows = 5;
    p.sequences.key_lengths = lengths.data();
    p.pages = {table.data(), columns, page_size, pages};
    for (const cpu::Kernel* kernel : test::sequence_kernels()) {
      Buffer out = Buffer(dtype, {1, heads, 5, dim}).filled(NAN), alone = out;
      Buffer row_max = Buffer(AttentionCase::accumulation(dtype), {1, heads, 5}).filled(NAN);
      Buffer row_sum = row_max;
      const auto outputs = [&](Buffer& to) {
        ForwardOutputs f;
        f.out = to.view();
        f.out.stride[0] = 0;
        f.row_max = row_max.data();
        f.row_sum = row_sum.data();
        return f;
      };
      kernel->forward(p, outputs(out), test::thread_pool(1));
      for (int64_t b = 0; b < 2; ++b) {
        kernel->forward(element_of(p, b), element_of(outputs(alone), p, b), test::thread_pool(1));
      }
      CHECK_FOR(same_bits(out, alone), std::string(kernel->isa) + " " + name_of(dtype));
    }
  }
}

TEST(new_keys_go_behind_those_of_the_cache) {
  for (const DType dtype : {DType::kFloat64, DType::kBFloat16}) {
    for (const bool packed : {false, true}) {
      for (const int64_t page_size : {0, 1, 7, 64, 257}) {
        for (const int threads : {1, 3}) check_append(dtype, packed, page_size, threads);
      }
    }
  }
}
