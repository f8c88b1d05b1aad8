// The backward of one side on Hopper, as sm80/backward/gradients.cuh has it: a block owns a tile of queries
// or keys, 64 rows for each of two warpgroups, and tiles of the others come as the producer brings them.
// Weights and gradients of scores leave the products as the left operands of the sums, in registers. While
// one warpgroup weighs, the other has the tensor cores.
//
// If a result is not finite, 0 * Inf or 0 * NaN of a hidden row may be why: then the tiles come once more.
#pragma once

#include "../../common/grid.cuh"
#include "../../sm80/backward/epilogue.cuh"
#include "../../sm80/backward/specials.cuh"
#include "../../sm80/backward/weigh.cuh"
#include "../../sm80/softmax.cuh"
#include "producer.cuh"

namespace selfattn::cuda::sm90::backward {

using sm80::Lane;
using sm80::Output;
using sm80::PackedWeights;
using sm80::Scores;
using sm80::backward::Place;

template <class C>
class Gradients {
 public:
  __device__ __forceinline__ Gradients(const Plan& plan, const SharedMemory<C>& shared)
      : plan_(plan.plan),
        p_(plan.plan.params),
        shared_(shared),
        work_(shared.work()),
        group_(group_of_warp()) {}

  // `tile`: how many have passed. Returns whether results were written.
  __device__ __forceinline__ bool run(int& tile) {
    tile_ = tile;
    slopes_.reset();
    sm80::clear(first_.at);
    sm80::clear(second_.at);
    if constexpr (C::kCareful) {
      pass_carefully();
      ptx::sync_threads(kConsumers, C::kThreads);  // nobody needs the tiles any more
    } else {
      pass();
      tile = tile_;
      if (!agree()) return false;
    }
    sm80::backward::write_gradients(plan_, work_, shared_, slopes_, first_, second_);
    return true;
  }

 private:
  // Named barriers: of all who compute, and, from the second on, a group's: the others' word that it is its
  // turn to issue products.
  static constexpr int kConsumers = 1, kTurns = 2;

  __device__ __forceinline__ void take_turn() const { ptx::sync_threads(kTurns + group_, C::kThreads); }
  __device__ __forceinline__ void give_turn() const { ptx::arrive_threads(kTurns + 1 - group_, C::kThreads); }

  __device__ __forceinline__ Control<C>& control() const { return shared_.control(); }

  // Where registers are scarcest, what can be worked out wherever it is asked for is not kept.
  __device__ __forceinline__ int tile() const { return C::kCareful ? ptx::opaque(tile_) : tile_; }
  __device__ __forceinline__ int group() const { return C::kCareful ? group_of_warp() : group_; }
  // The same of all lanes of a warp, and so that the compiler knows.
  static __device__ __forceinline__ int group_of_warp() {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    return __shfl_sync(kWholeWarp, thread / C::kGroupThreads, 0);
  }

  // While one group weighs, the other has the tensor cores: for the sums of its columns, then for the
  // products of its next ones, the first of which is there to go on with when the sums are done.
  __device__ __forceinline__ void pass() {
    if (group_ == 1) give_turn();  // the first turn is group 0's
    if (next_tile()) {
      take_turn();
      multiply_first();
      multiply_second();
      give_turn();
      weigh();
      int tile = tile_, column = column_;  // of the sums, where those of the products are one ahead
      while (next_columns()) {
        take_turn();
        add_products(tile, column);
        multiply_first();
        finish_sums<1>();
        if (tile != tile_) leave_summed(tile);
        multiply_second();
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
    if (group_ == 0) take_turn();  // as many as were given
    leave_last();
  }

  // The same, one step after the other.
  __device__ __forceinline__ void pass_carefully() {
    for (bool more = next_tile(); more;) {
      multiply_first();
      multiply_second();
      weigh();
      add_products(tile(), column_);
      finish_sums<0>();
      if (is_end_of_tile()) leave_summed(tile());
      more = next_columns();
    }
    leave_last();
  }

  // Behind the last tile of all. Returns whether all results are finite.
  __device__ __forceinline__ bool agree() const {
    bool finite = true;
    if constexpr (C::kSumsFirst) finite = finite && sm80::is_finite(first_.at);
    if constexpr (C::kSumsSecond) finite = finite && sm80::is_finite(second_.at);
    // Several warps may say so at the same time.
    if (__any_sync(kWholeWarp, !finite) && threadIdx.x % kWarp == 0) atomicAdd(&control().again, 1);
    arrive_of_warp(&control().done);
    ptx::barrier_wait(&control().done, 0);
    return control().again == 0;
  }

  // Waits for the tile. Returns whether there is one.
  __device__ __forceinline__ bool next_tile() {
    ptx::barrier_wait(&control().first_full[tile() % C::kFirstStages], tile() / C::kFirstStages & 1);
    return control().passing[tile() % C::kFirstStages].head >= 0;
  }
  __device__ __forceinline__ bool next_columns() {
    column_ += C::kColumns;
    if (column_ < C::kTileColumns) return true;
    column_ = 0;
    ++tile_;
    return next_tile();
  }
  __device__ __forceinline__ bool is_end_of_tile() const { return column_ + C::kColumns == C::kTileColumns; }

  // The group needs the tile no more: what is only multiplied when that is done, what is summed up later.
  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void leave(int tile) const {
    __syncwarp();
    if (threadIdx.x % kWarp != 0) return;
    if constexpr (kFirst) ptx::barrier_arrive(&control().first_empty[tile % C::kFirstStages]);
    if constexpr (kSecond) ptx::barrier_arrive(&control().second_empty[tile % C::kSecondStages]);
  }
  __device__ __forceinline__ void leave_multiplied(int tile) const {
    leave<!C::kSumsFirst, !C::kSumsSecond>(tile);
  }
  __device__ __forceinline__ void leave_summed(int tile) const { leave<C::kSumsFirst, C::kSumsSecond>(tile); }
  // The word that there are no more takes a place, too.
  __device__ __forceinline__ void leave_last() {
    leave<true, true>(tile());
    ++tile_;
  }

  __device__ __forceinline__ unsigned char* first_tile() const {
    return shared_.first(tile() % C::kFirstStages);
  }
  __device__ __forceinline__ unsigned char* second_tile() const {
    return shared_.second(tile() % C::kSecondStages);
  }

  // Of the columns.
  __device__ __forceinline__ Place<C> place(const Lane<C>& lane) const {
    const Passing passing = control().passing[tile() % C::kFirstStages];
    return {{plan_, work_, lane}, Passing{passing.head, passing.first + column_}};
  }
  __device__ __forceinline__ TileNumbers<C> numbers() const {
    return shared_.numbers(tile() % C::kFirstStages).part(column_);
  }

  // Starts the products of what the group owns and of the columns.
  __device__ __forceinline__ void multiply_first() {
    multiply<C::kFirstDim>(shared_.own_first(), first_tile(), s_);
  }
  __device__ __forceinline__ void multiply_second() {
    ptx::barrier_wait(&control().second_full[tile() % C::kSecondStages], tile() / C::kSecondStages & 1);
    if constexpr (C::kNeedsSecondDots) multiply<C::kSecondDim>(shared_.own_second(), second_tile(), dp_);
  }
  template <int kDim>
  __device__ __forceinline__ void multiply(const unsigned char* own, const unsigned char* passing,
                                           Scores<C>& products) {
    ptx::products_touch(products.at[0]);  // not between the fence and the first product
    ptx::products_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kColumns, false, false>(
          products.at[0], ptx::matrix_by_columns(own, C::kRows, group() * C::kGroupRows, step * 16),
          ptx::matrix_by_columns(passing, C::kTileColumns, column_, step * 16), step > 0);
    }
    ptx::products_commit();
  }

  // Waits for the products, which become weights and gradients of scores, and left operands.
  __device__ __forceinline__ void weigh() {
    if constexpr (!C::kPlain) {
      if (p_.mask.data != nullptr) mask_.load(place(Lane<C>()));
    }
    ptx::products_wait<0>();
    ptx::products_touch(s_.at[0]);
    if constexpr (C::kNeedsSecondDots) ptx::products_touch(dp_.at[0]);
    if constexpr (C::kCareful) clear_non_finite();
    sm80::backward::weigh(place(Lane<C>()), numbers(), mask_, slopes_, C::kCareful, s_, dp_);
    if constexpr (C::kCareful) {
      sm80::backward::add_special_terms(place(Lane<C>()), numbers(), s_, dp_, first_, second_);
    }
    if constexpr (C::kSumsSecond) weights_ = PackedWeights<C>(s_);
    if constexpr (C::kSumsFirst) gradients_ = PackedWeights<C>(dp_);
    if constexpr (!C::kSumsFirst || !C::kSumsSecond) {
      if (is_end_of_tile()) leave_multiplied(tile());
    }
  }

  // Starts the sums of a tile's columns, from one of them on.
  __device__ __forceinline__ void add_products(int tile, int column) {
#pragma unroll
    for (int step = 0; step < C::kColumns / 16; ++step) {
      if constexpr (C::kSumsSecond) ptx::products_touch(weights_.block[step][0][0]);
      if constexpr (C::kSumsFirst) ptx::products_touch(gradients_.block[step][0][0]);
    }
    ptx::products_fence();
    if constexpr (C::kSumsSecond) {
      add_product(weights_, shared_.second(tile % C::kSecondStages), column, second_);
    }
    if constexpr (C::kSumsFirst) {
      add_product(gradients_, shared_.first(tile % C::kFirstStages), column, first_);
    }
    ptx::products_commit();
  }
  __device__ __forceinline__ void add_product(PackedWeights<C>& factors, const unsigned char* passing,
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
    if constexpr (C::kSumsSecond) ptx::products_touch(second_.at[0]);
    if constexpr (C::kSumsFirst) ptx::products_touch(first_.at[0]);
  }

  // Zeroes what is not finite in the columns' queries or keys, and marks them, when all have their products.
  __device__ __forceinline__ void clear_non_finite() const {
    ptx::sync_threads(kConsumers, C::kThreads);
    if constexpr (C::kSumsFirst) clear_rows<C::kFirstPanels>(first_tile(), numbers().passing_first_flags());
    if constexpr (C::kSumsSecond)
      clear_rows<C::kSecondPanels>(second_tile(), numbers().passing_second_flags());
    ptx::fence_async_proxy();
    ptx::sync_threads(kConsumers, C::kThreads);
  }

  // Whole panels: chunks of 16 bytes have changed places within theirs.
  template <int kPanels>
  __device__ __forceinline__ void clear_rows(unsigned char* tile, unsigned char* flags) const {
    sm80::backward::clear_non_finite_rows<C, kPanels * 64>(flags, [&](int r, int chunk) {
      const int row_of_panels = chunk / 8 * C::kTileColumns + column_ + r;
      return tile + row_of_panels * SharedLayout<C>::kRowBytes + chunk % 8 * 16;
    });
  }

  const sm80::backward::Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  const int group_;
  int tile_ = 0, column_ = 0;  // how many have passed, and the first column that is computed with

  sm80::backward::MaskBits<C> mask_;
  sm80::backward::Slopes<C> slopes_;
  Scores<C> s_, dp_;
  PackedWeights<C> weights_, gradients_;
  Output<C> first_, second_;
};

template <class C>
__global__ void __launch_bounds__(C::kBlockThreads, 1) backward_kernel(const __grid_constant__ Plan plan) {
  if constexpr (ptx::kForHopper) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const int64_t block = block_of_grid();
    if (block >= plan.plan.blocks) return;
    const SharedMemory<C> shared(memory);
    if (threadIdx.x == 0) {
      shared.work() = Work<C>(plan.plan, sm80::backward::RowTile::of_block<C>(plan.plan, block));
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
