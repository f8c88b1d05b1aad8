// The warp that brings what others compute with: the tiles that the block owns, then those that pass by and
// of which the mask shows anything.
#pragma once

#include "../mask_tiles.cuh"
#include "plan.h"
#include "shared_memory.cuh"

namespace selfattn::cuda::sm90::backward {

template <class C>
class Producer {
 public:
  __device__ __forceinline__ Producer(const Plan& plan, const SharedMemory<C>& shared)
      : plan_(plan), p_(plan.plan.params), shared_(shared), work_(shared.work()) {}

  __device__ __forceinline__ void run() {
    bring_own();
    pass();
    wait_for_warp(&control().done, 0);
    if (control().again != 0) pass();
  }

 private:
  using Layout = SharedLayout<C>;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ Control<C>& control() const { return shared_.control(); }

  // Starts to copy a tile of queries or keys, from one of them on.
  template <bool kOfQueries, int kPanels>
  __device__ __forceinline__ void copy(const MappedTensor& tensor, int head, int row, unsigned char* to,
                                       uint64_t* barrier) const {
    constexpr int kRows = kOfQueries ? C::kTileQueries : C::kTileKeys;
    row += kOfQueries ? work_.first_query : work_.first_key;
    const int batch = kOfQueries ? work_.query_batch : work_.key_batch;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::copy_box_async(to + panel * kRows * Layout::kRowBytes, &tensor.map, barrier, panel * 64, row,
                          head * tensor.steps_of_head, batch * tensor.steps_of_batch);
    }
  }

  // The numbers of a tile of queries. Whoever has waited for the second operand finds them: this warp arrives
  // there later, behind a __syncwarp().
  __device__ __forceinline__ void bring_numbers(int head, int first_query, const TileNumbers<C>& to) const {
    const sm80::backward::Statistics& statistics = plan_.plan.statistics;
    const int64_t at = work_.first_statistic + head * statistics.queries + first_query;
#pragma unroll 1
    for (int n = lane() * 4; n < C::kTileQueries; n += 4 * kWarp) {
      const auto copy_four = [&](float* four, const float* from) {
        *reinterpret_cast<float4*>(four + n) = *reinterpret_cast<const float4*>(from + at + n);
      };
      copy_four(to.shift(), statistics.shift);
      if constexpr (!C::kPlain) copy_four(to.inverse_sum(), statistics.inverse_sum);
      copy_four(to.delta(), statistics.delta);
    }
  }

  __device__ __forceinline__ void bring_own() {
    uint64_t* const full = &control().own_full;
    const int head = C::kOwnsQueries ? work_.head : work_.kv_head, row = work_.first_row;
    if (lane() == 0) {
      ptx::barrier_arrive_expecting(full, Layout::kOwnFirstBytes + Layout::kOwnSecondBytes);
      copy<C::kOwnsQueries, C::kFirstPanels>(plan_.own_first, head, row, shared_.own_first(), full);
      if constexpr (C::kNeedsSecondDots) {
        copy<C::kOwnsQueries, C::kSecondPanels>(plan_.own_second, head, row, shared_.own_second(), full);
      }
    }
    if constexpr (C::kOwnsQueries) bring_numbers(head, row, shared_.numbers(0));
  }

  __device__ __forceinline__ void pass() {
#pragma unroll 1
    for (Passing passing = shown(work_.first_passing()); work_.holds(passing);
         passing = shown(work_.next(passing))) {
      bring_first(passing);
      bring_second(passing);
      ++tile_;
    }
    wait_for_first();
    wait_for_second();
    if (lane() == 0) {
      control().passing[first_stage()].head = -1;
      ptx::barrier_arrive(first_full());
      ptx::barrier_arrive(second_full());
    }
    ++tile_;
  }

  __device__ __forceinline__ int first_stage() const { return tile_ % C::kFirstStages; }
  __device__ __forceinline__ int second_stage() const { return tile_ % C::kSecondStages; }
  __device__ __forceinline__ uint64_t* first_full() const { return &control().first_full[first_stage()]; }
  __device__ __forceinline__ uint64_t* second_full() const { return &control().second_full[second_stage()]; }

  // Until nobody needs what is in the tile's place.
  __device__ __forceinline__ void wait_for_first() const {
    wait_for_warp(&control().first_empty[first_stage()], (tile_ / C::kFirstStages & 1) ^ 1);
  }
  __device__ __forceinline__ void wait_for_second() const {
    wait_for_warp(&control().second_empty[second_stage()], (tile_ / C::kSecondStages & 1) ^ 1);
  }

  // The first tile from this one on of which the mask shows anything.
  __device__ __forceinline__ Passing shown(Passing passing) const {
    if constexpr (!C::kPlain) {
      if (p_.mask.data == nullptr) return passing;
      while (work_.holds(passing)) {
        const int columns = work_.count(passing);
        const int first_query = work_.query(passing, 0, 0), first_key = work_.key(passing, 0, 0);
        const int queries = C::kOwnsQueries ? work_.rows : columns;
        const int keys = C::kOwnsQueries ? columns : work_.rows;
        const auto row_at = [&](int n) {
          return sm80::RowOf{passing.head, first_query + min(n, queries - 1)};
        };
        if (mask_shows_any(p_.mask, work_.batch, queries, first_key, keys, row_at)) break;
        passing = work_.next(passing);
      }
    }
    return passing;
  }

  __device__ __forceinline__ void bring_first(Passing passing) {
    wait_for_first();
    if (lane() == 0) {
      control().passing[first_stage()] = passing;
      ptx::barrier_arrive_expecting(first_full(), Layout::kFirstBytes);
      copy<!C::kOwnsQueries, C::kFirstPanels>(plan_.passing_first,
                                              C::kOwnsQueries ? work_.kv_head : passing.head, passing.first,
                                              shared_.first(first_stage()), first_full());
    }
    if constexpr (!C::kOwnsQueries) {
      bring_numbers(passing.head, passing.first, shared_.numbers(first_stage()));
    }
  }

  __device__ __forceinline__ void bring_second(Passing passing) {
    wait_for_second();
    if (lane() == 0) {
      ptx::barrier_arrive_expecting(second_full(), Layout::kSecondBytes);
      copy<!C::kOwnsQueries, C::kSecondPanels>(plan_.passing_second,
                                               C::kOwnsQueries ? work_.kv_head : passing.head, passing.first,
                                               shared_.second(second_stage()), second_full());
    }
  }

  const Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  int tile_ = 0;         // how many have passed
};

}  // namespace selfattn::cuda::sm90::backward
