// Batch elements with different lengths: where they are, and that no number leads outside.
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
    const PackedRows rows = packed_rows(starts, b, 12, 7);
    CHECK(rows.first == starts[b]);
    CHECK(rows.count == lengths[b]);
  }
}

TEST(no_start_leads_outside) {
  const int64_t numbers[] = {kLeast, -1, 0, 4, 9, 10, 11, kMost};
  for (const int64_t first : numbers) {
    for (const int64_t end : numbers) {
      const int64_t starts[] = {first, end};
      const PackedRows rows = packed_rows(starts, 0, 10, 6);
      CHECK(rows.first >= 0 && rows.count >= 0 && rows.count <= 6);
      CHECK(rows.first + rows.count <= 10);
    }
  }
}

TEST(no_length_exceeds_its_keys) {
  AttentionParams p;
  p.keys = 5;
  for (const int64_t length : {kLeast, int64_t{-1}, int64_t{0}, int64_t{4}, int64_t{5}, kMost}) {
    p.sequences.key_lengths = &length;
    const PackedRows keys = keys_of(p, 0);
    CHECK(keys.first == 0);
    CHECK(keys.count == (length < 0 ? 0 : (length > 5 ? 5 : length)));
  }
}

TEST(no_length_exceeds_a_packed_sequence) {
  const int64_t starts[] = {0, 3, 7}, lengths[] = {9, 2};
  AttentionParams p;
  p.keys = 9;
  p.sequences.key_starts = starts;
  p.sequences.key_rows = 7;
  p.sequences.key_lengths = lengths;
  CHECK(keys_of(p, 0).first == 0 && keys_of(p, 0).count == 3);
  CHECK(keys_of(p, 1).first == 3 && keys_of(p, 1).count == 2);
}

TEST(scores_are_counted_sequence_by_sequence) {
  const int64_t queries[] = {0, 3, 3, 5}, keys[] = {0, 4, 9, 16};
  AttentionParams p;
  p.batch = 3;
  p.heads = 2;
  p.queries = p.keys = 7;
  CHECK(count_of_scores(p) == 3 * 2 * 7 * 7);
  p.sequences.query_starts = queries;
  p.sequences.query_rows = 5;
  p.sequences.key_starts = keys;
  p.sequences.key_rows = 16;
  CHECK(count_of_scores(p) == 2 * (3 * 4 + 0 * 5 + 2 * 7));
}

TEST(masks_of_sequences_lie_one_behind_the_other) {
  const int64_t starts[] = {0, 3, 5};
  const OwnMask masks[] = {{0, {2, 3, 1}}, {6, {1, 2, 2}}};
  float numbers[10], gradients[10];
  AttentionParams p;
  p.batch = p.heads = 2;
  p.queries = p.keys = 9;
  p.mask.data = numbers;
  p.sequences.query_starts = p.sequences.key_starts = starts;
  p.sequences.query_rows = p.sequences.key_rows = 5;
  p.sequences.own_masks = masks;
  BackwardArguments a;
  a.grad_mask = View{gradients, DType::kFloat32, {1, 0, 0, 0}};
  for (int64_t b = 0; b < 2; ++b) {
    const View mask = element_of(p, b).mask, gradient = element_of(a, p, b).grad_mask;
    CHECK(mask.data == numbers + masks[b].first);
    CHECK(gradient.data == gradients + masks[b].first);
    for (const View& view : {mask, gradient}) {
      CHECK(view.stride[1] == (b == 0 ? 3 : 0));
      CHECK(view.stride[2] == (b == 0 ? 1 : 2));
      CHECK(view.stride[3] == b);
    }
    // Sequences do not share their gradients.
    CHECK(mask.stride[0] == 0 && gradient.stride[0] == 1);
  }
}

TEST(a_launch_for_a_sequence_is_limited_to_its_mask) {
  const int64_t starts[] = {0, 3, kMost, 5};
  const OwnMask masks[] = {{0, {1, 3, 1}}, {3, {1, 2, 4}}, {11, {1, 0, 7}}};
  float numbers[11];
  AttentionParams p;
  p.batch = 3;
  p.queries = p.keys = 6;
  p.mask.data = numbers;
  p.dropout.first_batch = 10;
  p.sequences.query_starts = p.sequences.key_starts = starts;
  p.sequences.query_rows = p.sequences.key_rows = 5;
  p.sequences.own_masks = masks;
  const int64_t queries[] = {3, 2, 0}, keys[] = {6, 4, 6};
  for (int64_t b = 0; b < 3; ++b) {
    const AttentionParams one = launch_of(p, b);
    CHECK(one.batch == 1 && one.queries == queries[b] && one.keys == keys[b]);
    CHECK(one.dropout.first_batch == 10 + b);
    CHECK(one.mask.data == numbers + masks[b].first);
    CHECK(one.sequences.query_starts == starts + b && one.sequences.own_masks == nullptr);
    CHECK(queries_of(one, 0).count <= queries[b] && keys_of(one, 0).count <= keys[b]);
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

namespace {

// A call whose pointers are all different numbers; each element's pointers are multiples away from them.
struct Call {
  int64_t query_starts[3] = {0, 2, 5}, key_starts[3] = {0, 4, 10}, offsets[2] = {-1, 6};
  int32_t table[6] = {};
  AttentionParams p;
  ForwardOutputs forward;
  WeightsOutputs weights;
  BackwardArguments backward;

  Call() {
    p.batch = p.heads = 2;
    p.queries = 3;
    p.keys = 6;
    p.rows_per_head = 5;
    p.dtype = DType::kBFloat16;
    p.query = view(1, 21, 4, p.dtype);
    p.key = view(2, 22, 5, p.dtype);
    p.value = view(3, 23, 6, p.dtype);
    p.mask = view(4, 24, 7, DType::kBool);
    p.alibi_slopes = {place(5), 25, 1};
    p.sinks = {place(6), 26, 1};
    p.dropout.first_batch = 3;
    p.sequences.query_rows = 5;
    p.sequences.key_rows = 10;
    p.sequences.query_offsets = offsets;
    p.pages.stride = 3;
    forward.out = view(7, 27, 8, p.dtype);
    forward.out_residual = place(8);
    forward.row_max = place(9);
    forward.row_sum = place(10);
    weights = {place(9), place(10), view(11, 31, 9, p.dtype)};
    backward.grad_out = view(12, 32, 10, p.dtype);
    backward.out = view(13, 33, 11, p.dtype);
    backward.out_residual = view(14, 34, 12, p.dtype);
    backward.row_max = place(9);
    backward.row_sum = place(10);
    backward.grad_row = place(15);
    backward.grad_weights = view(16, 36, 13, p.dtype);
    backward.grad_query = view(17, 37, 14, p.dtype);
    backward.grad_key = view(18, 38, 15, p.dtype);
    backward.grad_value = view(19, 39, 16, p.dtype);
    backward.grad_mask = view(20, 40, 17, DType::kFloat32);
    backward.grad_slopes_rows = place(21);
    backward.grad_sinks_rows = place(22);
  }

  static void* place(int64_t number) { return reinterpret_cast<void*>(number << 20); }
  static View view(int64_t number, int64_t batch, int64_t row, DType dtype) {
    return {place(number), dtype, {batch, 1000, row, 1}};
  }
};

// Returns how many bytes a pointer is beyond its place.
int64_t bytes(const void* data) { return reinterpret_cast<int64_t>(data) & 0xFFFFF; }

}  // namespace

TEST(an_element_is_a_call_of_its_own) {
  Call call;
  const AttentionParams second = element_of(call.p, 1);
  CHECK(second.batch == 1 && second.heads == 2 && second.queries == 3 && second.keys == 6);
  CHECK(second.query_offset == 6 && second.dropout.first_batch == 4 && second.rows_per_head == 5);
  CHECK(!second.sequences.any());
  CHECK(bytes(second.query.data) == 2 * 21 && bytes(second.key.data) == 2 * 22);
  CHECK(bytes(second.value.data) == 2 * 23 && bytes(second.mask.data) == 24);
  CHECK(bytes(second.alibi_slopes.data) == 4 * 25 && bytes(second.sinks.data) == 4 * 26);
  const int64_t row = 4 * (2 * 5);  // statistics are float32 arrays of (batch, heads, rows)
  const ForwardOutputs forward = element_of(call.forward, call.p, 1);
  CHECK(bytes(forward.out.data) == 2 * 27 && bytes(forward.out_residual) == 2 * 27);
  CHECK(bytes(forward.row_max) == row && bytes(forward.row_sum) == row);
  const WeightsOutputs weights = element_of(call.weights, call.p, 1);
  CHECK(bytes(weights.row_max) == row && bytes(weights.row_sum) == row &&
        bytes(weights.weights.data) == 2 * 31);
  const BackwardArguments backward = element_of(call.backward, call.p, 1);
  CHECK(bytes(backward.grad_out.data) == 2 * 32 && bytes(backward.out.data) == 2 * 33);
  CHECK(bytes(backward.out_residual.data) == 2 * 34 && bytes(backward.grad_weights.data) == 2 * 36);
  CHECK(bytes(backward.grad_query.data) == 2 * 37 && bytes(backward.grad_key.data) == 2 * 38);
  CHECK(bytes(backward.grad_value.data) == 2 * 39 && bytes(backward.grad_mask.data) == 4 * 40);
  for (const void* data : {backward.row_max, backward.row_sum, backward.grad_row,
                           static_cast<const void*>(backward.grad_slopes_rows),
                           static_cast<const void*>(backward.grad_sinks_rows)}) {
    CHECK(bytes(data) == row);
  }
}

TEST(an_element_of_packed_tensors_starts_where_it_starts) {
  Call call;
  call.p.sequences.query_starts = call.query_starts;
  call.p.sequences.key_starts = call.key_starts;
  const AttentionParams second = element_of(call.p, 1);
  CHECK(second.queries == 3 && second.keys == 6 && !second.sequences.any());
  CHECK(second.row(0, 1, 2) == 7);
  CHECK(bytes(second.query.data) == 2 * 2 * 4 && bytes(second.key.data) == 2 * 4 * 5);
  CHECK(bytes(second.value.data) == 2 * 4 * 6 && bytes(second.mask.data) == 24);
  const int64_t row = 4 * 2;  // (heads, rows of all sequences)
  const ForwardOutputs forward = element_of(call.forward, call.p, 1);
  CHECK(bytes(forward.out.data) == 2 * 2 * 8 && bytes(forward.out_residual) == 2 * 2 * 8);
  CHECK(bytes(forward.row_max) == row && bytes(forward.row_sum) == row);
  CHECK(bytes(element_of(call.weights, call.p, 1).weights.data) == 2 * 31);
  const BackwardArguments backward = element_of(call.backward, call.p, 1);
  CHECK(bytes(backward.grad_out.data) == 2 * 2 * 10 && bytes(backward.out.data) == 2 * 2 * 11);
  CHECK(bytes(backward.out_residual.data) == 2 * 2 * 12 && bytes(backward.grad_weights.data) == 2 * 36);
  CHECK(bytes(backward.grad_query.data) == 2 * 2 * 14 && bytes(backward.grad_key.data) == 2 * 4 * 15);
  CHECK(bytes(backward.grad_value.data) == 2 * 4 * 16 && bytes(backward.grad_mask.data) == 4 * 40);
  CHECK(bytes(backward.grad_slopes_rows) == row && bytes(backward.grad_sinks_rows) == row);
  // Only the keys are packed.
  call.p.sequences.query_starts = nullptr;
  CHECK(bytes(element_of(call.p, 1).query.data) == 2 * 21 &&
        bytes(element_of(call.p, 1).key.data) == 2 * 4 * 5);
  CHECK(bytes(element_of(call.backward, call.p, 1).grad_out.data) == 2 * 32);
  CHECK(bytes(element_of(call.backward, call.p, 1).grad_value.data) == 2 * 4 * 16);
}

TEST(an_element_in_pages_has_its_row_of_the_table_and_options_that_are_off_stay_off) {
  Call call;
  call.p.pages.table = call.table;
  call.p.sinks.data = nullptr;
  call.p.mask.data = nullptr;
  call.forward.out_residual = nullptr;
  call.backward.grad_slopes_rows = nullptr;
  const AttentionParams second = element_of(call.p, 1);
  CHECK(second.pages.table == call.table + 3);
  CHECK(bytes(second.key.data) == 0 && bytes(second.value.data) == 0 && bytes(second.query.data) == 2 * 21);
  CHECK(second.sinks.data == nullptr && second.mask.data == nullptr);
  CHECK(element_of(call.forward, call.p, 1).out_residual == nullptr);
  CHECK(element_of(call.backward, call.p, 1).grad_slopes_rows == nullptr);
}
