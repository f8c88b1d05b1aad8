// The forward: a tile of queries stays, and tiles of keys and values pass by, last to first.
//
// The method is that of Dao et al. 2022 and Dao 2023. Loads run ahead by half a tile: values come while
// scores are computed, the next keys while the softmax and the product with the values are.
#pragma once

#include "../common/grid.cuh"
#include "../mma/epilogue.cuh"
#include "../mma/non_finite.cuh"
#include "merge_key_warps.cuh"
#include "sm80_config.cuh"
#include "tile_scores.cuh"

namespace selfattn::cuda::sm80 {

using mma::Output;
using mma::PairedWeights;
using mma::Place;
using mma::Plan;

template <class C>
class Forward : TileScores<C> {
  using Base = TileScores<C>;
  using Base::p_, Base::plan_, Base::scores_, Base::shared_, Base::work_;
  using typename Base::Storage;

 public:
  __device__ __forceinline__ Forward(const Plan& plan, int64_t block, unsigned char* memory)
      : Base(plan, block, memory) {}

  __device__ __forceinline__ void run() {
    // The grid is that of the longest sequence. The kernel that takes a sequence is chosen by the sequence's
    // own length, as the kernels' bits differ.
    if (work_.rows <= 0 || counts_as_few(p_, work_.queries) != C::kFewQuery) return;
    this->start_queries();
    for (;;) {
      attend();
      // Once more if 0 * Inf or 0 * NaN of a hidden key may have spoilt the result.
      if (C::kFloat32 || work_.careful || !__syncthreads_or(!mma::is_finite(output_.at))) break;
      if (threadIdx.x == 0) shared_.work().careful = true;
      __syncthreads();
    }
    // A block that met no keys has not waited for its queries, and results take their place.
    ptx::copy_async_wait<0>();
    softmax_.finish(plan_.scale, plan_.scale_log2, output_, shared_);
    if constexpr (C::kColumnWarps > 1) merge_key_warps(shared_, this->lane(), softmax_, output_);
    __syncthreads();
    if (this->lane().thread >= kWarp * C::kRowWarps) return;
    if constexpr (!C::kFloat32) {
      if (work_.careful) mma::add_non_finite_values(plan_, work_, this->lane(), output_);
    }
    mma::write_rows(plan_, work_, this->lane(), shared_.exchange(), softmax_, output_);
  }

 private:
  __device__ __forceinline__ void attend() {
    reset();
    int tile = find_tile(work_.begin < work_.end ? (work_.end - 1) / C::kKeys : first_tile() - 1);
    if (tile >= first_tile()) {
      if constexpr (C::kBare) {
        passing_keys_.begin(this->keys_of(tile));
        passing_values_.begin(values_of(tile));
      }
      start_keys<false>(tile);
    }
    ptx::copy_async_commit();
    while (tile >= first_tile()) {
      if constexpr (C::kLean) {
        // Most tiles are computed in a loop of their own: branches among its products would keep the compiler
        // from choosing their order. It does not take the last tile, so that each loads the next tile's keys.
        if (!work_.careful && p_.pages.table == nullptr && tile < work_.whole_end / C::kKeys) {
          while (tile >= work_.first_whole_tile) tile = attend_tile<true>(tile);
        }
      }
      tile = attend_tile<false>(tile);
    }
  }

  // Returns the next tile. kLean: every row sees every key of the tile, so that all of them exist; they are
  // not in pages, the block is not careful, and there is a next tile.
  template <bool kLean>
  __device__ __forceinline__ int attend_tile(int tile) {
    const int first_key = tile * C::kKeys;
    const bool special_scores = this->wait_for_keys();
    start_values<kLean>(tile);
    ptx::copy_async_commit();
    if (has_rows()) this->template compute_scores<kLean>(first_key, special_scores);

    tile = find_tile(tile - 1);
    const bool special_values = wait_for_values<kLean>();
    if (kLean || tile >= first_tile()) start_keys<kLean>(tile);
    ptx::copy_async_commit();
    if (has_rows()) {
      softmax_.step(
          plan_.scale_log2, scores_,
          [&](int strip, int half, float by) { mma::scale_row(output_.at, strip, half, by); }, shared_);
      multiply_values(first_key, special_values);
    }
    return tile;
  }

  // output_ += weights values.
  __device__ __forceinline__ void multiply_values(int first_key, bool special) {
    const Operand values{shared_.values(), SharedLayout<C>::kTilePlane, this->lane().first_column};
    const int value_dim = static_cast<int>(p_.value_dim);
    const bool drops = !C::kBare && p_.dropout.enabled;
    if constexpr (C::kFloat32) {
      if (drops) mma::drop_weights(Place<C>{{plan_, work_, this->lane()}, first_key}, scores_);
      if (special) {
        add_special_values(Place<C>{{plan_, work_, this->lane()}, first_key}, shared_, scores_, output_);
      }
      accumulate<C>(scores_.at, values, this->lane().lane, value_dim, plan_.pieces, output_.at);
    } else {
      PairedWeights<C> paired(scores_);
      softmax_.add_rounded(paired, shared_);
      if (drops) mma::drop_weights(Place<C>{{plan_, work_, this->lane()}, first_key}, paired);
      accumulate_blocks<C, C::kColumnTiles / 2>([&](int n) -> const LeftBlock<C>& { return paired.block[n]; },
                                                values, this->lane().lane, value_dim, plan_.pieces,
                                                output_.at);
    }
  }

  __device__ __forceinline__ void reset() {
    softmax_.reset(shared_);
    mma::clear(output_.at);
  }

  // Warps without rows help to load. On the bare path they also compute, and the result is not used: each
  // warp has a scheduler of its own, so that others do not wait for it, and a test would cost registers.
  __device__ __forceinline__ bool has_rows() const { return C::kBare || this->lane().first_row < work_.rows; }

  // Read from shared memory wherever it is used: registers are scarcer than reads.
  __device__ __forceinline__ int first_tile() const { return work_.first_tile; }

  // Counts down from `tile` to a tile of which the mask shows anything to some row. Its bits are read by
  // then, long before they are needed.
  __device__ __forceinline__ int find_tile(int tile) {
    if constexpr (!C::kBare) {
      if (!this->has_mask()) return tile;
      while (tile >= first_tile() && !this->load_mask(tile)) --tile;
    }
    return tile;
  }

  __device__ __forceinline__ KeyRows values_of(int tile) const {
    return {p_.value, work_.first_value, tile * C::kKeys, static_cast<int>(p_.value_dim),
            plan_.value_vectors};
  }

  // kLean: all keys of the tile exist, and they are not in pages.
  template <bool kLean>
  __device__ __forceinline__ void start_keys(int tile) {
    if constexpr (C::kBare) {
      if (kLean || p_.pages.table == nullptr) {
        return passing_keys_.template start<kLean>(shared_.keys(), this->keys_of(tile), work_);
      }
    }
    Base::start_keys(tile);
  }
  template <bool kLean>
  __device__ __forceinline__ void start_values(int tile) {
    if constexpr (C::kBare) {
      if (kLean || p_.pages.table == nullptr) {
        return passing_values_.template start<kLean>(shared_.values(), values_of(tile), work_);
      }
    }
    sm80::start_keys<C, Storage>(C::kFloat32 ? shared_.staging() : shared_.values(), p_, work_,
                                 values_of(tile));
  }

  // Waits like wait_for_keys(). Returns whether values hold numbers without pieces.
  template <bool kLean>
  __device__ __forceinline__ bool wait_for_values() {
    ptx::copy_async_wait<0>();
    if constexpr (C::kFloat32) {
      __syncthreads();
      return __syncthreads_or(split_staged<C, true>(shared_, shared_.values(), shared_.value_flags())) != 0;
    }
    if (!kLean && work_.careful) clear_non_finite_values(shared_);
    __syncthreads();
    return false;
  }

  PassingRows<C, Storage> passing_keys_, passing_values_;
  mma::Softmax<C, SharedMemory<C>> softmax_;
  Output<C> output_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::least_blocks())
    forward_kernel(const __grid_constant__ Plan plan) {
  if constexpr (ptx::kForAmpere) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const int64_t block = block_of_grid();
    if (block < plan.blocks) Forward<C>(plan, block, memory).run();
  }
}

}  // namespace selfattn::cuda::sm80
