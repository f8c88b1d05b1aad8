// The scores of a block's rows and one tile of keys after another.
//
// Forward and weights share them, so that both see the same bits.
#pragma once

#include "../mma/score_options.cuh"
#include "loads.cuh"
#include "multiply.cuh"
#include "special_numbers.cuh"

namespace selfattn::cuda::sm80 {

using mma::Lane;
using mma::MaskBitsOf;
using mma::Place;
using mma::Plan;
using mma::Scores;

template <class C>
class TileScores {
 protected:
  using Storage = typename Element<C::kDType>::Storage;

  __device__ __forceinline__ TileScores(const Plan& plan, int64_t block, unsigned char* memory)
      : plan_(plan), p_(plan.params), shared_{memory}, work_(shared_.work()) {
    if (threadIdx.x == 0) shared_.work() = Work<C>(plan, block);
    __syncthreads();
  }

  // The lane is made anew wherever it is used: registers are scarcer than additions.
  static __device__ __forceinline__ Lane<C> lane() { return Lane<C>(); }

  // To be called once, before the first keys.
  __device__ __forceinline__ void start_queries() {
    special_query_ = sm80::start_queries<C>(plan_, work_, shared_);
  }

  __device__ __forceinline__ KeyRows keys_of(int tile) const {
    return {p_.key, work_.first_key, tile * C::kKeys, static_cast<int>(p_.head_dim), plan_.key_vectors};
  }
  __device__ __forceinline__ void start_keys(int tile) {
    sm80::start_keys<C, Storage>(C::kFloat32 ? shared_.staging() : shared_.keys(), p_, work_, keys_of(tile));
  }

  // When this returns, the tile is there for every warp, and every warp is done with what came before: 16-bit
  // types may then load over the tile of values. float32 needs the barrier twice, as keys and values take
  // turns in the same planes. Returns whether keys or queries hold numbers without pieces.
  __device__ __forceinline__ bool wait_for_keys() {
    ptx::copy_async_wait<0>();
    __syncthreads();
    if constexpr (C::kFloat32) {
      const bool special = split_staged<C, false>(shared_, shared_.keys(), shared_.key_flags());
      return __syncthreads_or(special || special_query_) != 0;
    }
    return false;
  }

  // Whether the mask or the function's map may hide a whole tile.
  __device__ __forceinline__ bool has_mask() const {
    return p_.mask.data != nullptr || (FunctionTile<float>::kAny && p_.function.map.blocks != nullptr);
  }
  // Reads the mask of a tile. Returns whether it and the function's map show anything to some row of the
  // block.
  __device__ __forceinline__ bool load_mask(int tile) {
    if constexpr (FunctionTile<float>::kAny) {
      if (hides_all(mma::seen_tile(work_, p_.function, tile * C::kKeys))) return false;
      if (p_.mask.data == nullptr) return true;
    }
    const Lane<C> lane_of_mask;
    return __syncthreads_or(mask_.load(Place<C>{{plan_, work_, lane_of_mask}, tile * C::kKeys})) != 0;
  }

  // kWhole: every row sees every key of the tile by its position.
  template <bool kWhole = false>
  __device__ __forceinline__ void compute_scores(int first_key, bool special) {
    using Layout = SharedLayout<C>;
    multiply_rows<C>(Operand{shared_.queries(), Layout::kQueryPlane, lane().first_row},
                     Operand{shared_.keys(), Layout::kTilePlane, lane().first_column}, lane().lane,
                     static_cast<int>(p_.head_dim), plan_.pieces, scores_.at);
    if constexpr (C::kFloat32) {
      if (special) replace_special_scores(Place<C>{{plan_, work_, lane()}, first_key}, shared_, scores_);
    }
    if constexpr (!C::kBare) {
      const Lane<C> lane_of_scores;
      const Place<C> place{{plan_, work_, lane_of_scores}, first_key};
      const auto ignore = [](int, int, int, int, float) {};
      mma::apply_options(place, plan_.scale, plan_.mask_pairs, scores_.at, ignore, ignore);
      if (p_.mask.data != nullptr) mma::hide_by_mask(lane_of_scores, mask_, scores_);
    }
    if (!kWhole && !mma::sees_whole_tile(work_, first_key)) {
      mma::hide_by_position(work_, lane(), first_key, scores_);
    }
  }

  const Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  bool special_query_ = false;
  Scores<C> scores_;
  MaskBitsOf<C> mask_;
};

}  // namespace selfattn::cuda::sm80
