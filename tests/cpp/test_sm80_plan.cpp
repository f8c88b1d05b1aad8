// How the sm80 kernels cut sequences whose lengths the host does not know. The plan is plain C++.
#include "cuda/sm80/sm80_plan.cpp"

#include "check.h"

using namespace selfattn;
using namespace selfattn::cuda::sm80;

namespace {

constexpr TileShape kThinTile = {16, 64, true};

AttentionParams packed_call(const int64_t* starts, int64_t batch, int64_t queries, int64_t keys) {
  AttentionParams p;
  p.batch = batch;
  p.heads = 32;
  p.kv_heads = 8;
  p.queries = queries;
  p.keys = keys;
  p.head_dim = p.value_dim = 128;
  p.dtype = DType::kBFloat16;
  p.sequences.query_starts = p.sequences.key_starts = starts;
  return p;
}

}  // namespace

TEST(splits_cover_the_keys_and_none_is_empty) {
  for (const int keys : {0, 1, 255, 256, 257, 700, 16384, 16385, 1000000, (1 << 30) - 1024}) {
    const Splits splits = splits_of(keys);
    CHECK(splits.count >= 1 && splits.count <= 64);
    CHECK(int64_t{splits.count} * splits.keys >= keys);
    CHECK(keys == 0 || int64_t{splits.count - 1} * splits.keys < keys);
  }
}

TEST(the_grid_has_room_for_the_splits_of_every_shorter_sequence) {
  const int64_t start = 0;  // never read by the host
  for (const int64_t longest : {1, 256, 300, 16384, 16385, 40000}) {
    const AttentionParams p = packed_call(&start, 3, 5, longest);
    const Plan plan = plan_forward(p, {}, kThinTile, nullptr);
    for (int keys = 0; keys <= longest; ++keys) CHECK(splits_of(keys).count <= plan.splits);
  }
}

TEST(launches_take_every_element_once_and_stay_in_the_workspace) {
  const int64_t start = 0;
  for (const int64_t queries : {1, 16, 5000}) {
    const AttentionParams p = packed_call(&start, 70, queries, 20000);
    const size_t bytes = forward_workspace(p);
    CHECK(bytes > 0 && bytes <= size_t{256} << 20);
    auto* workspace = reinterpret_cast<char*>(uintptr_t{1} << 40);
    Plan plan = plan_forward(p, {}, kThinTile, workspace);
    int64_t taken = 0;
    do {
      CHECK(plan.first_batch == taken && plan.batches > 0);
      CHECK(plan.blocks == plan.batches * p.kv_heads * plan.row_tiles * plan.splits);
      const int64_t states = plan.batches * p.heads * plan.partial_queries * plan.splits;
      CHECK(reinterpret_cast<char*>(plan.partial_out + states * p.value_dim) <= workspace + bytes);
      taken += plan.batches;
    } while (next_launch(plan, kThinTile));
    CHECK(taken == p.batch);
  }
}

TEST(long_queries_of_equal_length_need_no_workspace) {
  AttentionParams p = packed_call(nullptr, 70, 5000, 20000);
  CHECK(forward_workspace(p) == 0);
  p.queries = 16;
  CHECK(forward_workspace(p) > 0);
}
