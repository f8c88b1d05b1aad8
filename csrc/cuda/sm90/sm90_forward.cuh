// The forward on Hopper: two warpgroups with 64 queries each, and a producer of keys and values.
//
// Tiles of keys and values come to both warpgroups, last to first. While one computes weights, the other has
// the tensor cores: they take turns at issuing products (Shah et al. 2024). Within a warpgroup, the product
// with the values of one tile runs while the weights of the next are computed.
#pragma once

#include "../common/grid.cuh"
#include "../mma/epilogue.cuh"
#include "../mma/non_finite.cuh"
#include "producer.cuh"
#include "sm90_config.cuh"

namespace selfattn::cuda::sm90 {

using mma::Lane;
using mma::Output;
using mma::PairedWeights;
using mma::Place;
using mma::Scores;

// The sum of a pair of 16-bit numbers.
template <DType kDType>
__device__ __forceinline__ float sum_of_pair(uint32_t pair) {
  using E = Element<kDType>;
  if constexpr (kDType == DType::kBFloat16) {
    return float_from_bits(pair << 16) + float_from_bits(pair & 0xffff0000u);
  } else {
    return E::widen(static_cast<uint16_t>(pair)) + E::widen(static_cast<uint16_t>(pair >> 16));
  }
}

template <class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Plan& plan, const SharedMemory<C>& shared)
      : plan_(plan),
        p_(plan.params),
        shared_(shared),
        // Broadcast, so the compiler knows it is warp-uniform.
        group_(__shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / C::kGroupThreads, 0)) {}

  __device__ __forceinline__ void run() {
    if (group_ == 1) give_turn();  // the first turn is group 0's
    for (int item = 0;; ++item) {
      ptx::barrier_wait(&control().query_full, item & 1);
      const Work<C>& work = shared_.work(item);
      if (work.rows < 0) break;
      attend(work);
      store(work, item);
      arrive_of_warp(&control().done[item % kItems]);
    }
    if (group_ == 0) take_turn();  // so that as many turns are taken as were given
  }

 private:
  // Products are issued in turns. Each group has a named barrier, from 1 on; the other group signals this
  // barrier to pass the turn.
  __device__ __forceinline__ void take_turn() const { ptx::sync_threads(1 + group_, C::kThreads); }
  __device__ __forceinline__ void give_turn() const { ptx::arrive_threads(2 - group_, C::kThreads); }

  static __device__ __forceinline__ Lane<C> lane() { return Lane<C>(); }
  __device__ __forceinline__ Control<C>& control() const { return shared_.control_again(); }

  __device__ __forceinline__ void attend(const Work<C>& work) {
    softmax_.reset();
    mma::clear(output_.at);
    // Warp-uniform like group_, so the loop cannot diverge, and ptxas keeps descriptors of matrices and
    // addresses of barriers in uniform registers.
    first_tile_ = __shfl_sync(kWholeWarp, work.first_tile, 0);
    tile_ = __shfl_sync(kWholeWarp, work.begin < work.end ? (work.end - 1) / C::kKeys + 1 : first_tile_, 0);
    if constexpr (C::kOverlaps) {
      attend_overlapping(work);
    } else {
      while (next_tile()) {
        compute_scores(work);
        weigh(work, [&](int, int half, float by) { mma::scale_row(output_.at, 0, half, by); });
        pair(work);
        add_output();
      }
      arrive_of_warp(&control().query_empty);
    }
  }

  __device__ __forceinline__ void attend_overlapping(const Work<C>& work) {
    const bool any = next_tile();
    if (any) {
      compute_scores(work);
      weigh(work, [](int, int, float) {});
      pair(work);
      while (next_tile()) {
        ptx::barrier_wait(&control().value_full[values_.stage], values_.parity);
        take_turn();
        issue_scores();
        issue_output();
        give_turn();
        load_mask(work);
        ptx::products_wait<1>();
        float factors[2];
        weigh(work, [&](int, int half, float by) { factors[half] = by; });
        finish_output();
        mma::scale_row(output_.at, 0, 0, factors[0]);
        mma::scale_row(output_.at, 0, 1, factors[1]);
        pair(work);
      }
    }
    arrive_of_warp(&control().query_empty);
    if (any) add_output();
  }

  __device__ __forceinline__ void compute_scores(const Work<C>& work) {
    take_turn();
    issue_scores();
    give_turn();
    load_mask(work);
    ptx::products_wait<0>();
  }
  __device__ __forceinline__ void add_output() {
    ptx::barrier_wait(&control().value_full[values_.stage], values_.parity);
    issue_output();
    finish_output();
  }

  // Waits for the next tile of keys. Returns whether there is one.
  __device__ __forceinline__ bool next_tile() {
    if constexpr (C::kBare) {
      if (--tile_ < first_tile_) return false;
      ptx::barrier_wait(&control().key_full[keys_.stage], keys_.parity);
      return true;
    } else {
      ptx::barrier_wait(&control().key_full[keys_.stage], keys_.parity);
      tile_ = control().tile_of[keys_.stage];
      if (tile_ >= 0) return true;
      arrive_of_warp(&control().key_empty[keys_.stage]);
      keys_.advance();
      return false;
    }
  }

  // scores = queries keys^T of the stage.
  __device__ __forceinline__ void issue_scores() {
    ptx::products_fence();
    const unsigned char* const keys = shared_.keys(keys_.stage);
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kKeys, false, false>(
          scores_.at[0],
          ptx::matrix_by_columns(shared_.queries(), C::kRows, group_ * C::kGroupRows, step * 16),
          ptx::matrix_by_columns(keys, C::kKeys, 0, step * 16), step > 0);
    }
    ptx::products_commit();
  }

  // output += weights values of the stage.
  __device__ __forceinline__ void issue_output() {
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) ptx::products_touch(weights_.block[step][0][0]);
    ptx::products_fence();
    const unsigned char* const values = shared_.values(values_.stage);
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kValueDim, true>(
          output_.at[0], weights_.block[step][0][0], ptx::matrix_by_rows(values, C::kKeys, step * 16, 0),
          true);
    }
    ptx::products_commit();
  }

  __device__ __forceinline__ void finish_output() {
    ptx::products_wait<0>();
    ptx::products_touch(output_.at[0]);
    arrive_of_warp(&control().value_empty[values_.stage]);
    values_.advance();
  }

  __device__ __forceinline__ Place<C> place(const Work<C>& work, const Lane<C>& lane_of_scores) const {
    return {{plan_, work, lane_of_scores}, tile_ * C::kKeys};
  }

  // To be called while the products run.
  __device__ __forceinline__ void load_mask(const Work<C>& work) {
    if constexpr (!C::kBare) {
      const Lane<C> lane_of_mask;
      if (p_.mask.data != nullptr) mask_.load(place(work, lane_of_mask));
    }
  }

  // Turns scores, which have arrived, into weights. scale_output: see Softmax::step.
  template <class ScaleOutput>
  __device__ __forceinline__ void weigh(const Work<C>& work, const ScaleOutput& scale_output) {
    ptx::products_touch(scores_.at[0]);
    arrive_of_warp(&control().key_empty[keys_.stage]);
    keys_.advance();
    if constexpr (!C::kBare) {
      const Lane<C> lane_of_scores;
      const auto ignore = [](int, int, int, int, float) {};
      mma::apply_options(place(work, lane_of_scores), plan_.scale, plan_.mask_pairs, scores_.at, ignore,
                         ignore);
      if (p_.mask.data != nullptr) mma::hide_by_mask(lane_of_scores, mask_, scores_);
    }
    const int first_key = tile_ * C::kKeys;
    if (!mma::sees_whole_tile(work, first_key)) mma::hide_by_position(work, lane(), first_key, scores_);
    softmax_.step(plan_.scale_log2, scores_, scale_output);
  }

  // Makes a left operand of the weights, and sums up the rounded ones.
  __device__ __forceinline__ void pair(const Work<C>& work) {
    weights_ = PairedWeights<C>(scores_);
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; ++step) {
      const uint32_t (&pairs)[4] = weights_.block[step][0][0];
      softmax_.rounded[0][0] += sum_of_pair<C::kDType>(pairs[0]) + sum_of_pair<C::kDType>(pairs[2]);
      softmax_.rounded[0][1] += sum_of_pair<C::kDType>(pairs[1]) + sum_of_pair<C::kDType>(pairs[3]);
    }
    if constexpr (!C::kBare) {
      const Lane<C> lane_of_weights;
      if (p_.dropout.enabled) mma::drop_weights(place(work, lane_of_weights), weights_);
    }
  }

  __device__ __forceinline__ void store(const Work<C>& work, int item) {
    if (!work.careful && __any_sync(kWholeWarp, !is_finite(work))) {
      // A hidden NaN may be the reason: the item comes once more, with values that the producer has searched.
      // Several warps may ask for that at the same time.
      if (threadIdx.x % kWarp == 0) atomicAdd(&control().again[item % kItems], 1);
      return;
    }
    softmax_.rounded[0][0] = mma::sum_of_row(softmax_.rounded[0][0]);
    softmax_.rounded[0][1] = mma::sum_of_row(softmax_.rounded[0][1]);
    softmax_.finish(plan_.scale, plan_.scale_log2, output_);
    if (work.careful) mma::add_non_finite_values(plan_, work, lane(), output_);
    mma::write_rows(plan_, work, lane(), shared_.exchange(), softmax_, output_);
  }

  // Whether the lane's rows that exist are finite.
  __device__ __forceinline__ bool is_finite(const Work<C>& work) const {
    bool finite = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool of_row = true;
#pragma unroll
      for (int tile = 0; tile < C::kDimTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          of_row = of_row && fabsf(output_.at[0][tile][2 * half + i]) < infinity<float>();
        }
      }
      finite = finite && (of_row || lane().row(0, half) >= work.rows);
    }
    return finite;
  }

  const mma::Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const int group_;
  RingPosition<C::kStages> keys_, values_;
  int tile_ = 0, first_tile_ = 0;  // the current tile, and the last to come

  Scores<C> scores_;
  PairedWeights<C> weights_;
  Output<C> output_;
  mma::Softmax<C> softmax_;
  mma::MaskBitsOf<C> mask_;
};

template <class C>
__global__ void __launch_bounds__(C::kBlockThreads, 1) forward_kernel(const __grid_constant__ Plan plan) {
  if constexpr (ptx::kForHopper) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const SharedMemory<C> shared(memory);
    if (threadIdx.x == 0) shared.control().init();
    __syncthreads();
    if (threadIdx.x >= C::kThreads) {
      ptx::give_up_registers<C::kProducerRegisters>();
      if (threadIdx.x < C::kThreads + kWarp) Producer<C>(plan, shared).run();
    } else {
      ptx::take_registers<C::kRegisters>();
      Consumer<C>(plan, shared).run();
    }
  }
}

}  // namespace selfattn::cuda::sm90
