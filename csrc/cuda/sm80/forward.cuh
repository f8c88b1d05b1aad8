// The forward: a tile of queries stays, tiles of keys and values pass by, last to first (Dao et al. 2022;
// Dao 2023). Loads run ahead by half a tile: values come while scores are computed, the next keys while the
// softmax and the product with the values are.
#pragma once

#include "epilogue.cuh"
#include "multiply.cuh"
#include "non_finite.cuh"
#include "special.cuh"

namespace selfattn::cuda::sm80 {

template <class C>
class Forward {
  using Storage = typename Element<C::kDType>::Storage;

 public:
  __device__ __forceinline__ Forward(const ForwardPlan& plan, int64_t block, unsigned char* memory)
      : plan_(plan), p_(plan.params), work_(plan, block), shared_{memory} {
    keys_of_head_ = static_cast<const Storage*>(p_.key.data) + p_.key.offset(work_.batch, work_.kv_head, 0);
    values_of_head_ =
        static_cast<const Storage*>(p_.value.data) + p_.value.offset(work_.batch, work_.kv_head, 0);
  }

  __device__ __forceinline__ void run() {
    special_query_ = start_queries<C>(plan_, work_, shared_);
    bool careful = false;
    for (;; careful = true) {
      attend(careful);
      if (C::kFloat32 || careful || !__syncthreads_or(!is_finite(output_))) break;
    }
    // A block that met no keys has not waited for its queries, whose place the results take.
    ptx::copy_async_wait<0>();
    softmax_.finish(plan_.scale);
    if constexpr (C::kKeyWarps > 1) merge_key_warps(shared_, lane_, softmax_, output_);
    __syncthreads();  // the results take the place of the tiles
    if (lane_.thread >= 32 * C::kRowWarps) return;
    if constexpr (!C::kFloat32) {
      if (careful) add_non_finite_values(plan_, work_, lane_, output_);
    }
    write_rows(plan_, work_, lane_, shared_, softmax_, output_);
  }

 private:
  __device__ __forceinline__ void attend(bool careful) {
    reset();
    const bool busy = lane_.first_row < work_.rows;
    const int first = work_.begin / C::kKeys;
    int tile = find_tile(work_.begin < work_.end ? (work_.end - 1) / C::kKeys : first - 1, first);
    if (tile >= first) start_keys(tile);
    ptx::copy_async_commit();
    while (tile >= first) {
      const int first_key = tile * C::kKeys;
      const bool special_scores = wait_for_keys();
      start_values(tile);
      ptx::copy_async_commit();
      if (busy) compute_scores(first_key, special_scores);

      tile = find_tile(tile - 1, first);
      const bool special_values = wait_for_values(careful);
      if (tile >= first) start_keys(tile);
      ptx::copy_async_commit();
      if (busy) {
        softmax_.step(plan_.scale_log2, scores_, output_);
        if (!C::kPlain && p_.dropout.enabled) drop_weights(plan_, work_, lane_, first_key, scores_);
        if constexpr (C::kFloat32) {
          if (special_values) add_special_values(plan_, work_, lane_, shared_, first_key, scores_, output_);
        }
        multiply_values(shared_, lane_, static_cast<int>(p_.value_dim), plan_.pieces, scores_, output_);
      }
    }
  }

  __device__ __forceinline__ void reset() {
    softmax_.reset();
#pragma unroll
    for (int strip = 0; strip < C::kStrips; ++strip) {
#pragma unroll
      for (int n = 0; n < C::kDimTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output_.at[strip][n][i] = 0.0f;
      }
    }
  }

  // The next tile, counting down from `tile`, of which the mask shows anything to some row; its bits are read
  // by then, long before they are needed.
  __device__ __forceinline__ int find_tile(int tile, int first) {
    if constexpr (!C::kPlain) {
      if (p_.mask.data == nullptr) return tile;
      while (tile >= first && !__syncthreads_or(mask_.load(plan_, work_, lane_, tile * C::kKeys))) --tile;
    }
    return tile;
  }

  __device__ __forceinline__ void compute_scores(int first_key, bool special) {
    multiply_scores(shared_, lane_, static_cast<int>(p_.head_dim), plan_.pieces, scores_);
    if constexpr (C::kFloat32) {
      if (special) replace_special_scores(plan_, work_, lane_, shared_, first_key, scores_);
    }
    if constexpr (!C::kPlain) apply_options(plan_, work_, lane_, first_key, mask_, scores_);
    if (!sees_whole_tile<C>(plan_, work_, first_key)) {
      hide_by_position(plan_, work_, lane_, first_key, scores_);
    }
  }

  __device__ __forceinline__ int count(int first_key) const {
    const int left = static_cast<int>(p_.keys) - first_key;
    return left < C::kKeys ? left : C::kKeys;
  }
  __device__ __forceinline__ void start_keys(int tile) {
    const int first_key = tile * C::kKeys;
    start_rows<C>(C::kFloat32 ? shared_.staging() : shared_.keys(),
                  keys_of_head_ + first_key * p_.key.stride[2], p_.key.stride[2], count(first_key),
                  static_cast<int>(p_.head_dim), plan_.key_vectors);
  }
  __device__ __forceinline__ void start_values(int tile) {
    const int first_key = tile * C::kKeys;
    start_rows<C>(C::kFloat32 ? shared_.staging() : shared_.values(),
                  values_of_head_ + first_key * p_.value.stride[2], p_.value.stride[2], count(first_key),
                  static_cast<int>(p_.value_dim), plan_.value_vectors);
  }

  // When these return, the tile is there for every warp, and every warp is done with what came before: 16-bit
  // types may then load over the other of the two tiles. float32 needs the barrier twice, as both tiles take
  // turns in the same planes. Returns whether the tile (or the queries) holds numbers that need attention.
  __device__ __forceinline__ bool wait_for_keys() {
    ptx::copy_async_wait<0>();
    if constexpr (C::kFloat32) {
      __syncthreads();
      const bool special = split_staged<C, false>(shared_, shared_.keys(), shared_.key_flags());
      return __syncthreads_or(special || special_query_) != 0;
    } else {
      __syncthreads();
      return false;
    }
  }
  __device__ __forceinline__ bool wait_for_values(bool careful) {
    ptx::copy_async_wait<0>();
    if constexpr (C::kFloat32) {
      __syncthreads();
      return __syncthreads_or(split_staged<C, true>(shared_, shared_.values(), shared_.value_flags())) != 0;
    } else {
      if (careful) clear_non_finite_values(shared_);
      __syncthreads();
      return false;
    }
  }

  const ForwardPlan& plan_;
  const AttentionParams& p_;
  const Work<C> work_;
  const Lane<C> lane_;
  const SharedMemory<C> shared_;
  const Storage* keys_of_head_;
  const Storage* values_of_head_;
  bool special_query_ = false;

  Scores<C> scores_;
  Softmax<C> softmax_;
  Output<C> output_;
  MaskBits<C> mask_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward_kernel(const ForwardPlan plan) {
  SELFATTN_DYNAMIC_SHARED(memory);
  const int64_t block = blockIdx.x + static_cast<int64_t>(blockIdx.y) * gridDim.x;
  if (block < plan.blocks) Forward<C>(plan, block, memory).run();
}

}  // namespace selfattn::cuda::sm80
