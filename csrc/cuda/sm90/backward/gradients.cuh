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
    while (next_tile()) {
#pragma unroll 1
      for (int part = 0; part < C::kParts; ++part) attend(part * C::kColumns);
      leave_tile();
    }
    leave_tile();
    if constexpr (C::kCareful) {
      ptx::sync_threads(kConsumers, C::kThreads);  // nobody needs the tiles any more
    } else {
      tile = tile_;
      if (!agree()) return false;
    }
    sm80::backward::write_gradients(plan_, work_, shared_, slopes_, first_, second_);
    return true;
  }

 private:
  // The named barrier of those who compute.
  static constexpr int kConsumers = 1;

  static __device__ __forceinline__ Lane<C> lane() { return Lane<C>(); }
  __device__ __forceinline__ Control<C>& control() const { return shared_.control(); }

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

  // Waits for the next tile. Returns whether there is one.
  __device__ __forceinline__ bool next_tile() {
    ptx::barrier_wait(&control().first_full[first_stage()], tile_ / C::kFirstStages & 1);
    return control().passing[first_stage()].head >= 0;
  }
  __device__ __forceinline__ void leave_tile() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      ptx::barrier_arrive(&control().first_empty[first_stage()]);
      ptx::barrier_arrive(&control().second_empty[second_stage()]);
    }
    ++tile_;
  }
  // Where registers are scarcest, what can be worked out wherever it is asked for is not kept.
  __device__ __forceinline__ int tile() const { return C::kCareful ? ptx::opaque(tile_) : tile_; }
  __device__ __forceinline__ int group() const { return C::kCareful ? group_of_warp() : group_; }
  // The same of all lanes of a warp, and so that the compiler knows.
  static __device__ __forceinline__ int group_of_warp() {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    return __shfl_sync(kWholeWarp, thread / C::kGroupThreads, 0);
  }
  __device__ __forceinline__ int first_stage() const { return tile() % C::kFirstStages; }
  __device__ __forceinline__ int second_stage() const { return tile() % C::kSecondStages; }

  // Columns of the tile, from one of them on.
  __device__ __forceinline__ void attend(int first_column) {
    ptx::products_fence();
    multiply(shared_.own_first(), shared_.first(first_stage()), first_column, s_);
    if (first_column == 0) {
      ptx::barrier_wait(&control().second_full[second_stage()], tile_ / C::kSecondStages & 1);
    }
    if constexpr (C::kNeedsSecondDots) {
      ptx::products_fence();
      multiply(shared_.own_second(), shared_.second(second_stage()), first_column, dp_);
    }
    if constexpr (!C::kPlain) {
      if (p_.mask.data != nullptr) mask_.load(place(Lane<C>(), first_column));
    }
    ptx::products_wait<0>();
    ptx::products_touch(s_.at[0]);
    if constexpr (C::kNeedsSecondDots) ptx::products_touch(dp_.at[0]);
    if constexpr (C::kCareful) clear_non_finite(first_column);
    sm80::backward::weigh(place(Lane<C>(), first_column), numbers(first_column), mask_, slopes_, C::kCareful,
                          s_, dp_);
    if constexpr (C::kCareful) {
      sm80::backward::add_special_terms(place(Lane<C>(), first_column), numbers(first_column), s_, dp_,
                                        first_, second_);
    }
    accumulate(first_column);
  }

  __device__ __forceinline__ Place<C> place(const Lane<C>& lane, int first_column) const {
    const Passing passing = control().passing[first_stage()];
    return {{plan_, work_, lane}, Passing{passing.head, passing.first + first_column}};
  }
  __device__ __forceinline__ TileNumbers<C> numbers(int first_column) const {
    return shared_.numbers(first_stage()).part(first_column);
  }

  // products = own passing^T, of the rows of this warpgroup.
  __device__ __forceinline__ void multiply(const unsigned char* own, const unsigned char* passing,
                                           int first_column, Scores<C>& products) {
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kColumns, false, false>(
          products.at[0], ptx::matrix_by_columns(own, C::kRows, group() * C::kGroupRows, step * 16),
          ptx::matrix_by_columns(passing, C::kTileColumns, first_column, step * 16), step > 0);
    }
    ptx::products_commit();
  }

  // Of all tiles, the sums of gradients and of weights.
  __device__ __forceinline__ void accumulate(int first_column) {
    PackedWeights<C> weights, gradients;
    if constexpr (C::kSumsSecond) weights = PackedWeights<C>(s_);
    if constexpr (C::kSumsFirst) gradients = PackedWeights<C>(dp_);
#pragma unroll
    for (int step = 0; step < C::kColumns / 16; ++step) {
      if constexpr (C::kSumsSecond) ptx::products_touch(weights.block[step][0][0]);
      if constexpr (C::kSumsFirst) ptx::products_touch(gradients.block[step][0][0]);
    }
    ptx::products_fence();
    if constexpr (C::kSumsSecond) add_product(weights, shared_.second(second_stage()), first_column, second_);
    if constexpr (C::kSumsFirst) add_product(gradients, shared_.first(first_stage()), first_column, first_);
    ptx::products_wait<0>();
    if constexpr (C::kSumsSecond) ptx::products_touch(second_.at[0]);
    if constexpr (C::kSumsFirst) ptx::products_touch(first_.at[0]);
  }

  // sum += factors passing.
  __device__ __forceinline__ void add_product(PackedWeights<C>& factors, const unsigned char* passing,
                                              int first_column, Output<C>& sum) {
#pragma unroll
    for (int step = 0; step < C::kColumns / 16; ++step) {
      ptx::product_async<C::kBFloat16, C::kDim, true>(
          sum.at[0], factors.block[step][0][0],
          ptx::matrix_by_rows(passing, C::kTileColumns, first_column + step * 16, 0), true);
    }
    ptx::products_commit();
  }

  // Zeroes what is not finite in the columns' queries or keys, and marks them, when all have their products.
  __device__ __forceinline__ void clear_non_finite(int first_column) const {
    ptx::sync_threads(kConsumers, C::kThreads);
    const auto clear = [&](unsigned char* tile, unsigned char* flags) {
      sm80::backward::clear_non_finite_rows<C>(flags, [&](int r, int chunk) {
        const int row_of_panels = chunk / 8 * C::kTileColumns + first_column + r;
        return tile + row_of_panels * SharedLayout<C>::kRowBytes + chunk % 8 * 16;
      });
    };
    if constexpr (C::kSumsFirst)
      clear(shared_.first(first_stage()), numbers(first_column).passing_first_flags());
    if constexpr (C::kSumsSecond)
      clear(shared_.second(second_stage()), numbers(first_column).passing_second_flags());
    ptx::fence_async_proxy();
    ptx::sync_threads(kConsumers, C::kThreads);
  }

  const sm80::backward::Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  const int group_;
  int tile_;

  sm80::backward::MaskBits<C> mask_;
  sm80::backward::Slopes<C> slopes_;
  Scores<C> s_, dp_;
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
