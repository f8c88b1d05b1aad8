// Elements of batches with lengths of their own: where they lie, and that no number leads outside.
#include "core/sequences.h"

#include <cstdint>
#include <limits>

#include "check.h"

using namespace selfattn;

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();

}  // namespace

TEST(pieces_lie_where_the_starts_say) {
  const int64_t starts[] = {0, 3, 3, 10};
  const int64_t lengths[] = {3, 0, 7};
  for (int64_t b = 0; b < 3; ++b) {
    const Piece piece = piece_of(starts, b, 12, 7);
    CHECK(piece.first == starts[b]);
    CHECK(piece.count == lengths[b]);
  }
}

TEST(no_start_leads_outside) {
  const int64_t numbers[] = {kLeast, -1, 0, 4, 9, 10, 11, kMost};
  for (const int64_t first : numbers) {
    for (const int64_t end : numbers) {
      const int64_t starts[] = {first, end};
      const Piece piece = piece_of(starts, 0, 10, 6);
      CHECK(piece.first >= 0 && piece.count >= 0 && piece.count <= 6);
      CHECK(piece.first + piece.count <= 10);
    }
  }
}

TEST(no_length_exceeds_its_keys) {
  AttentionParams p;
  p.keys = 5;
  for (const int64_t length : {kLeast, int64_t{-1}, int64_t{0}, int64_t{4}, int64_t{5}, kMost}) {
    p.sequences.key_lengths = &length;
    const Piece keys = keys_of(p, 0);
    CHECK(keys.first == 0);
    CHECK(keys.count == (length < 0 ? 0 : (length > 5 ? 5 : length)));
  }
}

TEST(keys_lie_in_their_page_and_in_no_page_that_does_not_exist) {
  const int32_t table[] = {7, 2, -5, 1, 9, std::numeric_limits<int32_t>::max()};
  View view;
  view.stride[0] = 1000;
  view.stride[1] = 100;
  view.stride[2] = 10;
  const Pages pages{table, 3, 4, 8};
  CHECK(offset_of_key(view, pages, 0, 1, 3) == 7 * 1000 + 100 + 30);
  CHECK(offset_of_key(view, pages, 0, 1, 4) == 2 * 1000 + 100);
  CHECK(offset_of_key(view, pages, 0, 0, 8) == 0);
  CHECK(offset_of_key(view, pages, 1, 0, 2) == 1 * 1000 + 20);
  CHECK(offset_of_key(view, pages, 1, 0, 5) == 7 * 1000 + 10);
  CHECK(offset_of_key(view, pages, 1, 0, 11) == 7 * 1000 + 30);
  CHECK(offset_of_key(view, Pages{}, 2, 1, 3) == 2 * 1000 + 100 + 30);
}

TEST(an_element_is_a_call_of_its_own) {
  float numbers[64] = {};
  const int64_t starts[] = {0, 2, 5}, offsets[] = {-1, 6};
  AttentionParams p;
  p.batch = 2;
  p.heads = 2;
  p.queries = 3;
  p.keys = 4;
  p.rows_per_head = 5;
  p.query.data = p.key.data = p.value.data = p.mask.data = numbers;
  p.query.stride[1] = 20;
  p.query.stride[2] = 4;
  p.key.stride[0] = 24;
  p.mask.dtype = DType::kBool;
  p.mask.stride[0] = 12;
  p.sinks = {numbers, 2, 1};
  p.dropout.first_batch = 3;
  p.sequences.query_starts = starts;
  p.sequences.query_rows = 5;
  p.sequences.query_offsets = offsets;
  const AttentionParams second = element_of(p, 1);
  CHECK(second.batch == 1 && second.queries == 3 && second.keys == 4 && second.query_offset == 6);
  CHECK(second.query.data == numbers + 2 * 4);
  CHECK(second.key.data == numbers + 24);
  CHECK(second.mask.data == reinterpret_cast<char*>(numbers) + 12);
  CHECK(second.sinks.data == numbers + 2);
  CHECK(second.alibi_slopes.data == nullptr);
  CHECK(second.dropout.first_batch == 4);
  CHECK(second.row(0, 1, 2) == 7);
  CHECK(!second.sequences.any());
  ForwardOutputs outputs;
  outputs.out = p.query;
  outputs.row_max = outputs.row_sum = numbers;
  const ForwardOutputs of_second = element_of(outputs, p, 1);
  CHECK(of_second.out.data == numbers + 2 * 4);
  CHECK(of_second.row_max == numbers + 2);
  CHECK(of_second.out_residual == nullptr);
}
