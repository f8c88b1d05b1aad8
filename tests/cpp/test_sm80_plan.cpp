// How the sm80 kernels divide sequences whose lengths the host does not know. The plan is plain C++.
#include "cuda/mma/forward_plan.cpp"

#include "check.h"

using namespace selfattn;
using namespace selfattn::cuda;
using namespace selfattn::cuda::mma;

namespace {

constexpr TileShape kFewQueryTile = {16, 64, true};

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
    const Splits<int64_t> splits = splits_of<int64_t>(keys);
    CHECK(splits.count >= 1 && splits.count <= 64);
    CHECK(int64_t{splits.count} * splits.keys >= keys);
    CHECK(keys == 0 || int64_t{splits.count - 1} * splits.keys < keys);
    const Splits<uint32_t> same = splits_of(static_cast<uint32_t>(keys));
    CHECK(same.count == splits.count && same.keys == splits.keys);
  }
}

TEST(the_grid_has_room_for_the_splits_of_every_shorter_sequence) {
  const int64_t start = 0;  // never read by the host
  for (const int64_t longest : {1, 256, 300, 16384, 16385, 40000}) {
    const AttentionParams p = packed_call(&start, 3, 5, longest);
    const Plan plan = plan_forward(p, {}, kFewQueryTile, nullptr);
    for (int keys = 0; keys <= longest; ++keys)
      CHECK(splits_of<int64_t>(keys).count <= plan.split_launch.splits);
  }
}

TEST(launches_take_every_element_once_and_stay_in_the_workspace) {
  const int64_t start = 0;
  for (const int64_t queries : {1, 16, 5000}) {
    const AttentionParams p = packed_call(&start, 70, queries, 20000);
    const size_t bytes = forward_workspace(p);
    CHECK(bytes > 0 && bytes <= size_t{256} << 20);
    auto* workspace = reinterpret_cast<char*>(uintptr_t{1} << 40);
    Plan plan = plan_forward(p, {}, kFewQueryTile, workspace);
    int64_t taken = 0;
    do {
      CHECK(plan.split_launch.first_batch == taken && plan.split_launch.batches > 0);
      CHECK(plan.blocks ==
            plan.split_launch.batches * p.kv_heads * plan.row_tiles * plan.split_launch.splits);
      const int64_t states =
          plan.split_launch.batches * p.heads * plan.split_launch.queries * plan.split_launch.splits;
      CHECK(reinterpret_cast<char*>(plan.split_launch.out + states * p.value_dim) <= workspace + bytes);
      taken += plan.split_launch.batches;
    } while (next_launch(plan, kFewQueryTile));
    CHECK(taken == p.batch);
  }
}

TEST(states_of_either_accumulation_type_stay_in_their_workspace) {
  const int64_t start = 0;
  for (const bool rounds : {false, true}) {
    AttentionParams p = packed_call(&start, 70, 16, 20000);
    p.value_dim = 331;
    const size_t bytes = split_workspace<double>(p, rounds);
    CHECK(bytes > 0 && bytes <= size_t{256} << 20);
    auto* workspace = reinterpret_cast<char*>(uintptr_t{1} << 40);
    const SplitLaunch<double> launch = first_split_launch<double>(p, workspace, rounds);
    CHECK(launch.batches > 0 && launch.batches < p.batch);
    const int64_t states = launch.state(p.heads, launch.batches, 0, 0);
    CHECK(reinterpret_cast<char*>(launch.out + states * p.value_dim) == workspace + bytes);
    CHECK(launch.out - launch.max == (rounds ? 3 : 2) * states);
  }
}

TEST(long_queries_of_equal_length_need_no_workspace) {
  AttentionParams p = packed_call(nullptr, 70, 5000, 20000);
  CHECK(forward_workspace(p) == 0);
  p.queries = 16;
  CHECK(forward_workspace(p) > 0);
}
