// The warp that loads what other warps of the backward compute with.
//
// It copies the tiles that the block owns, then those that pass by and of which the mask shows anything.
#pragma once

#include "../mask_tiles.cuh"
#include "sm90_backward_plan.h"
#include "sm90_backward_shared_memory.cuh"

namespace selfattn::cuda::sm90::backward {

template <class C>
class Producer {
 public:
  __device__ __forceinline__ Producer(const Plan& plan, const SharedMemory<C>& shared)
      : plan_(plan), p_(plan.params), shared_(shared), work_(shared.work()) {}

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

  // Copies the statistics of a tile of queries. A warp that has waited for the tile of vo finds them: this
  // warp arrives there later, after a __syncwarp().
  __device__ __forceinline__ void bring_numbers(int head, int first_query, const TileNumbers<C>& to) const {
    const mma::backward::Statistics& statistics = plan_.statistics;
    const int64_t at = work_.first_statistic + head * statistics.queries + first_query;
#pragma unroll 1
    for (int n = lane() * 4; n < C::kTileQueries; n += 4 * kWarp) {
      const auto copy_four = [&](float* four, const float* from) {
        *reinterpret_cast<float4*>(four + n) = *reinterpret_cast<const float4*>(from + at + n);
      };
      copy_four(to.shift(), statistics.shift);
      if constexpr (!C::kBare) copy_four(to.inverse_sum(), statistics.inverse_sum);
      copy_four(to.delta(), statistics.delta);
    }
  }

  __device__ __forceinline__ void bring_own() {
    uint64_t* const full = &control().own_full;
    const int head = C::kOwnsQueries ? work_.head : work_.kv_head, row = work_.first_row;
    if (lane() == 0) {
      ptx::barrier_arrive_expecting(full, Layout::kOwnQKBytes + Layout::kOwnVOBytes);
      copy<C::kOwnsQueries, C::kQKPanels>(plan_.own_qk, head, row, shared_.own_qk(), full);
      if constexpr (C::kNeedsDP) {
        copy<C::kOwnsQueries, C::kVOPanels>(plan_.own_vo, head, row, shared_.own_vo(), full);
      }
    }
    if constexpr (C::kOwnsQueries) bring_numbers(head, row, shared_.numbers(0));
  }

  __device__ __forceinline__ void pass() {
#pragma unroll 1
    for (Passing passing = shown(work_.first_passing()); work_.holds(passing);
         passing = shown(work_.next(passing))) {
      bring_qk(passing);
      bring_vo(passing);
      ++tile_;
    }
    wait_for_qk();
    wait_for_vo();
    if (lane() == 0) {
      control().passing[qk_stage()].head = -1;
      ptx::barrier_arrive(qk_full());
      ptx::barrier_arrive(vo_full());
    }
    ++tile_;
  }

  __device__ __forceinline__ int qk_stage() const { return tile_ % C::kQKStages; }
  __device__ __forceinline__ int vo_stage() const { return tile_ % C::kVOStages; }
  __device__ __forceinline__ uint64_t* qk_full() const { return &control().qk_full[qk_stage()]; }
  __device__ __forceinline__ uint64_t* vo_full() const { return &control().vo_full[vo_stage()]; }

  // These wait until no warp needs what is in the tile's place.
  __device__ __forceinline__ void wait_for_qk() const {
    wait_for_warp(&control().qk_empty[qk_stage()], (tile_ / C::kQKStages & 1) ^ 1);
  }
  __device__ __forceinline__ void wait_for_vo() const {
    wait_for_warp(&control().vo_empty[vo_stage()], (tile_ / C::kVOStages & 1) ^ 1);
  }

  // The first tile from this one on of which the mask shows anything.
  __device__ __forceinline__ Passing shown(Passing passing) const {
    if constexpr (!C::kBare) {
      if (p_.mask.data == nullptr) return passing;
      while (work_.holds(passing)) {
        const int columns = work_.count(passing);
        const int first_query = work_.query(passing, 0, 0), first_key = work_.key(passing, 0, 0);
        const int queries = C::kOwnsQueries ? work_.rows : columns;
        const int keys = C::kOwnsQueries ? columns : work_.rows;
        const auto row_at = [&](int n) {
          return mma::RowOf{passing.head, first_query + min(n, queries - 1)};
        };
        if (mask_shows_any(p_.mask, plan_.mask_chunks, work_.batch, queries, first_key, keys, row_at)) break;
        passing = work_.next(passing);
      }
    }
    return passing;
  }

  __device__ __forceinline__ void bring_qk(Passing passing) {
    wait_for_qk();
    if (lane() == 0) {
      control().passing[qk_stage()] = passing;
      ptx::barrier_arrive_expecting(qk_full(), Layout::kQKBytes);
      copy<!C::kOwnsQueries, C::kQKPanels>(plan_.passing_qk, C::kOwnsQueries ? work_.kv_head : passing.head,
                                           passing.first, shared_.qk(qk_stage()), qk_full());
    }
    if constexpr (!C::kOwnsQueries) {
      bring_numbers(passing.head, passing.first, shared_.numbers(qk_stage()));
    }
  }

  __device__ __forceinline__ void bring_vo(Passing passing) {
    wait_for_vo();
    if (lane() == 0) {
      ptx::barrier_arrive_expecting(vo_full(), Layout::kVOBytes);
      copy<!C::kOwnsQueries, C::kVOPanels>(plan_.passing_vo, C::kOwnsQueries ? work_.kv_head : passing.head,
                                           passing.first, shared_.vo(vo_stage()), vo_full());
    }
  }

  const Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  int tile_ = 0;         // how many have passed
};

}  // namespace selfattn::cuda::sm90::backward
