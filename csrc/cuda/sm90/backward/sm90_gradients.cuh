// The backward of one side on Hopper: a block owns queries or keys, and the others pass by.
//
// Each of two warpgroups has 64 rows, and the producer loads the tiles that pass by. Weights and gradients of
// scores leave the products as the left operands of the sums, in registers. While one warpgroup weighs, the
// other has the tensor cores.
//
// If a result is not finite, 0 * Inf or 0 * NaN of a hidden row may be the reason: then the tiles come once
// more.
#pragma once

#include "../../common/grid.cuh"
#include "../../mma/backward/backward_epilogue.cuh"
#include "../../mma/backward/special_terms.cuh"
#include "../../mma/backward/weigh.cuh"
#include "../../mma/paired_weights.cuh"
#include "backward_producer.cuh"

namespace selfattn::cuda::sm90::backward {

using mma::Lane;
using mma::Output;
using mma::PairedWeights;
using mma::Scores;
using mma::backward::Place;

template <class C>
class Gradients {
 public:
  __device__ __forceinline__ Gradients(const Plan& plan, const SharedMemory<C>& shared)
      : plan_(plan), p_(plan.params), shared_(shared), work_(shared.work()), group_(group_of_warp()) {}

  // `tile`: how many have passed. Returns whether results were written.
  __device__ __forceinline__ bool run(int& tile) {
    tile_ = tile;
    slopes_.reset();
    mma::clear(qk_sum_.at);
    mma::clear(vo_sum_.at);
    if constexpr (C::kCareful) {
      pass_carefully();
      ptx::sync_threads(kConsumers, C::kThreads);  // no warp needs the tiles any more
    } else {
      pass();
      tile = tile_;
      if (!agree()) return false;
    }
    mma::backward::write_gradients(plan_, work_, shared_, slopes_, qk_sum_, vo_sum_);
    return true;
  }

 private:
  // Named barriers: one of all warps that compute, and, from the second on, one of each group. The other
  // group signals this barrier to pass the turn to issue products.
  static constexpr int kConsumers = 1, kTurns = 2;

  __device__ __forceinline__ void take_turn() const { ptx::sync_threads(kTurns + group_, C::kThreads); }
  __device__ __forceinline__ void give_turn() const { ptx::arrive_threads(kTurns + 1 - group_, C::kThreads); }

  __device__ __forceinline__ Control<C>& control() const { return shared_.control(); }

  // Where registers are scarcest, these numbers are worked out wherever they are used.
  __device__ __forceinline__ int tile() const { return C::kCareful ? ptx::opaque(tile_) : tile_; }
  __device__ __forceinline__ int group() const { return C::kCareful ? group_of_warp() : group_; }
  // Broadcast, so the compiler knows it is warp-uniform.
  static __device__ __forceinline__ int group_of_warp() {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    return __shfl_sync(kWholeWarp, thread / C::kGroupThreads, 0);
  }

  // While one group weighs, the other has the tensor cores: for the sums of its columns, then for the
  // products of its next columns. The first of these is issued before the sums are waited for, so that the
  // tensor cores have something to go on with.
  __device__ __forceinline__ void pass() {
    if (group_ == 1) give_turn();  // the first turn is group 0's
    if (next_tile()) {
      take_turn();
      multiply_qk();
      multiply_vo();
      give_turn();
      weigh();
      int tile = tile_, column = column_;  // those of the sums; those of the products are one ahead
      while (next_columns()) {
        take_turn();
        add_products(tile, column);
        multiply_qk();
        finish_sums<1>();
        if (tile != tile_) leave_summed(tile);
        multiply_vo();
        give_turn();
        weigh();
        tile = tile_;
        column = column_;
      }
      take_turn();
      add_products(tile, column);
      finish_sums<0>();
      leave_summed(tile);
      give_turn();
    }
    if (group_ == 0) take_turn();  // so that as many turns are taken as were given
    leave_last();
  }

  // The same, one step after another.
  __device__ __forceinline__ void pass_carefully() {
    for (bool more = next_tile(); more;) {
      multiply_qk();
      multiply_vo();
      weigh();
      add_products(tile(), column_);
      finish_sums<0>();
      if (is_end_of_tile()) leave_summed(tile());
      more = next_columns();
    }
    leave_last();
  }

  // To be called after the last tile. Returns whether all results of the block are finite.
  __device__ __forceinline__ bool agree() const {
    bool finite = true;
    if constexpr (C::kSumsQK) finite = finite && mma::is_finite(qk_sum_.at);
    if constexpr (C::kSumsVO) finite = finite && mma::is_finite(vo_sum_.at);
    // Several warps may find that at the same time.
    if (__any_sync(kWholeWarp, !finite) && threadIdx.x % kWarp == 0) atomicAdd(&control().again, 1);
    arrive_of_warp(&control().done);
    ptx::barrier_wait(&control().done, 0);
    return control().again == 0;
  }

  // Waits for the tile. Returns whether there is one.
  __device__ __forceinline__ bool next_tile() {
    ptx::barrier_wait(&control().qk_full[tile() % C::kQKStages], tile() / C::kQKStages & 1);
    return control().passing[tile() % C::kQKStages].head >= 0;
  }
  __device__ __forceinline__ bool next_columns() {
    column_ += C::kColumns;
    if (column_ < C::kTileColumns) return true;
    column_ = 0;
    ++tile_;
    return next_tile();
  }
  __device__ __forceinline__ bool is_end_of_tile() const { return column_ + C::kColumns == C::kTileColumns; }

  // Signals that the group no longer needs the tile of an operand: after the products if it is only
  // multiplied, otherwise after the sums.
  template <bool kQK, bool kVO>
  __device__ __forceinline__ void leave(int tile) const {
    __syncwarp();
    if (threadIdx.x % kWarp != 0) return;
    if constexpr (kQK) ptx::barrier_arrive(&control().qk_empty[tile % C::kQKStages]);
    if constexpr (kVO) ptx::barrier_arrive(&control().vo_empty[tile % C::kVOStages]);
  }
  __device__ __forceinline__ void leave_multiplied(int tile) const { leave<!C::kSumsQK, !C::kSumsVO>(tile); }
  __device__ __forceinline__ void leave_summed(int tile) const { leave<C::kSumsQK, C::kSumsVO>(tile); }
  // The stage that says that there are no more tiles is left, too.
  __device__ __forceinline__ void leave_last() {
    leave<true, true>(tile());
    ++tile_;
  }

  __device__ __forceinline__ unsigned char* qk_tile() const { return shared_.qk(tile() % C::kQKStages); }
  __device__ __forceinline__ unsigned char* vo_tile() const { return shared_.vo(tile() % C::kVOStages); }

  // The place of the columns.
  __device__ __forceinline__ Place<C> place(const Lane<C>& lane) const {
    const Passing passing = control().passing[tile() % C::kQKStages];
    return {{plan_, work_, lane}, Passing{passing.head, passing.first + column_}};
  }
  __device__ __forceinline__ TileNumbers<C> numbers() const {
    return shared_.numbers(tile() % C::kQKStages).part(column_);
  }

  // These start the products of what the group owns and of the columns.
  __device__ __forceinline__ void multiply_qk() { multiply<C::kQKDim>(shared_.own_qk(), qk_tile(), s_); }
  __device__ __forceinline__ void multiply_vo() {
    ptx::barrier_wait(&control().vo_full[tile() % C::kVOStages], tile() / C::kVOStages & 1);
    if constexpr (C::kNeedsDP) multiply<C::kVODim>(shared_.own_vo(), vo_tile(), dp_);
  }
  template <int kDim>
  __device__ __forceinline__ void multiply(const unsigned char* own, const unsigned char* passing,
                                           Scores<C>& products) {
    ptx::products_touch(products.at[0]);  // must not be between the fence and the first product
    ptx::products_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kColumns, false, false>(
          products.at[0], ptx::matrix_by_columns(own, C::kRows, group() * C::kGroupRows, step * 16),
          ptx::matrix_by_columns(passing, C::kTileColumns, column_, step * 16), step > 0);
    }
    ptx::products_commit();
  }

  // Waits for the products, and makes weights and gradients of scores of them, as left operands.
  __device__ __forceinline__ void weigh() {
    if constexpr (!C::kBare) {
      if (p_.mask.data != nullptr) mask_.load(place(Lane<C>()));
    }
    ptx::products_wait<0>();
    ptx::products_touch(s_.at[0]);
    if constexpr (C::kNeedsDP) ptx::products_touch(dp_.at[0]);
    if constexpr (C::kCareful) clear_non_finite();
    mma::backward::weigh(place(Lane<C>()), numbers(), mask_, slopes_, C::kCareful, s_, dp_);
    if constexpr (C::kCareful) {
      mma::backward::add_special_terms(place(Lane<C>()), numbers(), s_, dp_, qk_sum_, vo_sum_);
    }
    if constexpr (C::kSumsVO) weights_ = PairedWeights<C>(s_);
    if constexpr (C::kSumsQK) gradients_ = PairedWeights<C>(dp_);
    if constexpr (!C::kSumsQK || !C::kSumsVO) {
      if (is_end_of_tile()) leave_multiplied(tile());
    }
  }

  // Starts the sums over a tile's columns from `column` on.
  __device__ __forceinline__ void add_products(int tile, int column) {
#pragma unroll
    for (int step = 0; step < C::kColumns / 16; ++step) {
      if constexpr (C::kSumsVO) ptx::products_touch(weights_.block[step][0][0]);
      if constexpr (C::kSumsQK) ptx::products_touch(gradients_.block[step][0][0]);
    }
    ptx::products_fence();
    if constexpr (C::kSumsVO) {
      add_product(weights_, shared_.vo(tile % C::kVOStages), column, vo_sum_);
    }
    if constexpr (C::kSumsQK) {
      add_product(gradients_, shared_.qk(tile % C::kQKStages), column, qk_sum_);
    }
    ptx::products_commit();
  }
  __device__ __forceinline__ void add_product(PairedWeights<C>& factors, const unsigned char* passing,
                                              int column, Output<C>& sum) {
#pragma unroll
    for (int step = 0; step < C::kColumns / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kSumDim, true>(
          sum.at[0], factors.block[step][0][0],
          ptx::matrix_by_rows(passing, C::kTileColumns, column + step * 16, 0), true);
    }
  }
  template <int kLater>
  __device__ __forceinline__ void finish_sums() {
    ptx::products_wait<kLater>();
    if constexpr (C::kSumsVO) ptx::products_touch(vo_sum_.at[0]);
    if constexpr (C::kSumsQK) ptx::products_touch(qk_sum_.at[0]);
  }

  // When all warps have their products, zeroes what is not finite in the columns' queries or keys, and marks
  // these.
  __device__ __forceinline__ void clear_non_finite() const {
    ptx::sync_threads(kConsumers, C::kThreads);
    if constexpr (C::kSumsQK) clear_rows<C::kQKPanels>(qk_tile(), numbers().passing_qk_flags());
    if constexpr (C::kSumsVO) clear_rows<C::kVOPanels>(vo_tile(), numbers().passing_vo_flags());
    ptx::fence_async_proxy();
    ptx::sync_threads(kConsumers, C::kThreads);
  }

  // It goes by whole panels, since chunks of 16 bytes have changed places within theirs.
  template <int kPanels>
  __device__ __forceinline__ void clear_rows(unsigned char* tile, unsigned char* flags) const {
    mma::backward::clear_non_finite_rows<C, kPanels * 64>(flags, [&](int r, int chunk) {
      const int row_of_panels = chunk / 8 * C::kTileColumns + column_ + r;
      return tile + row_of_panels * SharedLayout<C>::kRowBytes + chunk % 8 * 16;
    });
  }

  const mma::backward::Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  const int group_;
  int tile_ = 0, column_ = 0;  // how many tiles have passed, and the first column that is computed with

  mma::backward::MaskBits<C> mask_;
  mma::backward::Slopes<C> slopes_;
  Scores<C> s_, dp_;
  PairedWeights<C> weights_, gradients_;
  Output<C> qk_sum_, vo_sum_;
};

template <class C>
__global__ void __launch_bounds__(C::kBlockThreads, 1) backward_kernel(const __grid_constant__ Plan plan) {
  if constexpr (ptx::kForHopper) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const int64_t block = block_of_grid();
    if (block >= plan.blocks) return;
    const SharedMemory<C> shared(memory);
    if (threadIdx.x == 0) {
      shared.work() = Work<C>(plan, mma::backward::RowTile::of_block<C>(plan, block));
      shared.control().init();
    }
    __syncthreads();
    if (shared.work().rows <= 0) return;  // a sequence shorter than the longest
    if (threadIdx.x >= C::kThreads) {
      ptx::give_up_registers<C::kProducerRegisters>();
      if (threadIdx.x < C::kThreads + kWarp) Producer<C>(plan, shared).run();
    } else {
      ptx::take_registers<C::kRegisters>();
      ptx::barrier_wait(&shared.control().own_full, 0);
      int tile = 0;
      if (!Gradients<C>(plan, shared).run(tile)) {
        using Careful = typename C::Careful;
        Gradients<Careful>(plan, SharedMemory<Careful>(memory)).run(tile);
      }
    }
  }
}

}  // namespace selfattn::cuda::sm90::backward
