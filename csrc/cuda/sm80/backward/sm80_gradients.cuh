// The backward of one side: a block owns a tile of queries or keys, tiles of the others pass by, and for each
// pair of tiles the weights and the gradients of the scores are worked out anew, from
//
//   s = first own, first passing: q k        dp = second own, second passing: dO v
//
// so that nothing has to be added up between blocks. Rows are what the block owns in both directions: weights
// and gradients leave mma as they are wanted for the sums over the columns, and never leave the registers.
//
// One tile of each passing operand is in shared memory. The second comes while the first is accumulated, the
// first while the products of the second are computed.
#pragma once

#include "../../common/grid.cuh"
#include "../../mma/backward/backward_epilogue.cuh"
#include "../../mma/backward/special_terms.cuh"
#include "../../mma/backward/weigh.cuh"
#include "backward_loads.cuh"
#include "products.cuh"
#include "scaled_rows.cuh"
#include "special_products.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::Lane;
using mma::Output;
using mma::Scores;
using mma::backward::Passing;
using mma::backward::Place;
using mma::backward::Plan;
using mma::backward::RowTile;

template <class C>
class Gradients {
 public:
  __device__ __forceinline__ Gradients(const Plan& plan, const RowTile& tile, unsigned char* memory)
      : plan_(plan), p_(plan.params), shared_{memory}, work_(shared_.work()) {
    if (threadIdx.x == 0) shared_.work() = Work<C>(plan, tile);
    __syncthreads();
  }

  // Returns whether results were written: not if they turned out not to be finite, and 0 * Inf or 0 * NaN of
  // a hidden row may be why.
  __device__ __forceinline__ bool run() {
    if (work_.rows <= 0) return true;  // a sequence shorter than the longest
    load_own<C>(plan_, work_, shared_);
    reset();
    if constexpr (C::kNeedsDP) {
      pass();
    } else {
      pass_values();
    }
    if (!C::kCareful && __syncthreads_or(!finite())) return false;
    // A block that met no tile has not waited for its own, whose place the results take.
    ptx::copy_async_wait<0>();
    __syncthreads();
    write();
    return true;
  }

 private:
  // Made anew wherever it is asked for: registers are scarcer than additions.
  static __device__ __forceinline__ Lane<C> lane() { return Lane<C>(); }

  __device__ __forceinline__ void reset() {
    slopes_.reset();
    scaled_.reset();
    if constexpr (C::kSumsQK) mma::clear(qk_sum_.at);
    if constexpr (C::kSumsVO) mma::clear(vo_sum_.at);
  }

  __device__ __forceinline__ bool finite() const {
    bool finite = true;
    if constexpr (C::kSumsQK) finite = finite && mma::is_finite(qk_sum_.at);
    if constexpr (C::kSumsVO) finite = finite && mma::is_finite(vo_sum_.at);
    return finite;
  }

  // The first tile from `passing` on of which the mask shows anything to some row; its bits are read by then.
  __device__ __forceinline__ Passing find(Passing passing) {
    if constexpr (!C::kBare) {
      const bool has_map = FunctionTile<float>::kAny && p_.function.map.blocks != nullptr;
      if (p_.mask.data == nullptr && !has_map) return passing;
      while (work_.holds(passing) && !shows(passing)) passing = work_.next(passing);
    }
    return passing;
  }

  // Reads the mask of a tile. Returns whether it and the function's map show anything to some row of the
  // block.
  __device__ __forceinline__ bool shows(Passing passing) {
    if constexpr (FunctionTile<float>::kAny) {
      if (hides_all(mma::backward::seen_tile(work_, p_.function, passing))) return false;
      if (p_.mask.data == nullptr) return true;
    }
    const Lane<C> lane;
    return __syncthreads_or(mask_.load(Place<C>{{plan_, work_, lane}, passing})) != 0;
  }

  // Warps without rows help to load. Where registers are scarcest, and on the plain path, they compute, too,
  // what nobody wants: see the forward's. Keys of 128 dims ask, as all products without a condition spill.
  __device__ __forceinline__ bool has_rows() const {
    constexpr bool kAsks = C::kDim == 128 && C::kSide == Side::kKeyValue;
    return C::kFloat32 || C::kDim == 256 || (C::kBare && !kAsks) || lane().first_row < work_.rows;
  }

  __device__ __forceinline__ void pass() {
    Passing passing = find(work_.first_passing());
    bool more = work_.holds(passing), special_vo = false;
    if (more) special_vo = load_vo<C>(plan_, work_, shared_, passing);
    ptx::copy_async_commit();
    while (more) {
      ptx::copy_async_wait<0>();
      __syncthreads();  // the second tile is there; every warp is done with the first
      const bool special_qk = load_qk<C>(plan_, work_, shared_, passing);
      ptx::copy_async_commit();
      if (has_rows()) multiply_vo(plan_, shared_, dp_);
      ptx::copy_async_wait<0>();
      const bool special = meet(special_qk || special_vo);
      if (has_rows()) multiply_qk(plan_, shared_, s_);
      attend(passing, special);
      if constexpr (C::kSumsVO) {
        if (has_rows()) accumulate_vo(plan_, shared_, s_, vo_sum_);
      }
      passing = find(work_.next(passing));
      more = work_.holds(passing);
      // The products of the second tile were done at the last barrier, its accumulation and its flags were
      // not.
      if (C::kSumsVO || C::kCareful) __syncthreads();
      if (more) special_vo = load_vo<C>(plan_, work_, shared_, passing);
      ptx::copy_async_commit();
      if (has_rows()) accumulate_qk(plan_, shared_, dp_, qk_sum_);
    }
  }

  // The same for weights alone, which need no dp: the order is the forward's.
  __device__ __forceinline__ void pass_values() {
    static_assert(!C::kFloat32 || C::kNeedsDP, "float32 sums both at once");
    Passing passing = find(work_.first_passing());
    if (work_.holds(passing)) load_qk<C>(plan_, work_, shared_, passing);
    ptx::copy_async_commit();
    while (work_.holds(passing)) {
      ptx::copy_async_wait<0>();
      __syncthreads();  // the first tile is there; every warp is done with the second
      load_vo<C>(plan_, work_, shared_, passing);
      ptx::copy_async_commit();
      if (has_rows()) multiply_qk(plan_, shared_, s_);
      if (C::kCareful) ptx::copy_async_wait<0>();
      attend(passing, false);
      passing = find(work_.next(passing));
      ptx::copy_async_wait<0>();
      __syncthreads();  // the second tile is there; every warp is done with the first
      if (work_.holds(passing)) load_qk<C>(plan_, work_, shared_, passing);
      ptx::copy_async_commit();
      if (has_rows()) accumulate_vo(plan_, shared_, s_, vo_sum_);
    }
  }

  // A barrier. Returns whether any thread met numbers without pieces.
  __device__ __forceinline__ bool meet(bool special) {
    if constexpr (C::kFloat32) {
      const int row = lane().thread % C::kRows;
      const bool own = shared_.own_qk_flags()[row] || shared_.own_vo_flags()[row];
      return __syncthreads_or(special || own) != 0;
    }
    __syncthreads();
    return false;
  }

  // From products to weights and gradients. The terms of numbers that need attention are added here, one by
  // one; in the tiles they are zero.
  __device__ __forceinline__ void attend(Passing passing, bool special) {
    if constexpr (C::kFloat32) {
      if (special && has_rows()) {
        replace_special_products(Place<C>{{plan_, work_, lane()}, passing}, shared_, s_, dp_);
      }
    } else if constexpr (C::kCareful) {
      __syncthreads();
      special = __syncthreads_or(clear_non_finite<C>(shared_)) != 0;
    }
    if (!has_rows()) return;
    const bool careful = C::kFloat32 ? special : C::kCareful;
    mma::backward::weigh(Place<C>{{plan_, work_, lane()}, passing}, shared_, mask_, slopes_, careful, s_,
                         dp_);
    if constexpr (C::kFloat32 && C::kSumsQK) scaled_.scale(dp_, qk_sum_);
    if constexpr (C::kCareful) {
      if (special) {
        mma::backward::add_special_terms(Place<C>{{plan_, work_, lane()}, passing}, shared_, s_, dp_, qk_sum_,
                                         vo_sum_);
      }
    }
  }

  __device__ __forceinline__ void write() {
    if constexpr (C::kFloat32 && C::kSumsQK) scaled_.undo(qk_sum_);
    mma::backward::write_gradients(plan_, work_, shared_, slopes_, qk_sum_, vo_sum_);
  }

  const Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;  // lies in shared memory
  mma::backward::MaskBits<C> mask_;
  mma::backward::Slopes<C> slopes_;
  ScaledRows<C> scaled_;
  Scores<C> s_, dp_;
  Output<C> qk_sum_, vo_sum_;
};

// Again, where NaN or Inf showed: rare, and a function of its own, so that it takes no registers from the
// kernel.
template <class C>
__device__ SELFATTN_CALLED void start_over(const Plan& plan, unsigned char* memory) {
  using Careful = typename C::Careful;
  static_assert(Careful::kThreads == C::kThreads && C::kRows % Careful::kRows == 0 &&
                    SharedLayout<Careful>::kBytes <= SharedLayout<C>::kBytes,
                "the same block can do it all again");
#pragma unroll 1
  for (int part = 0; part < C::kRows / Careful::kRows; ++part) {
    // By its numbers: a copy would read the bytes behind them, too, which nobody writes.
    const RowTile& before = SharedMemory<C>{memory}.work().tile;
    const RowTile tile{before.unit, before.first_row + (part > 0 ? Careful::kRows : 0)};
    __syncthreads();
    Gradients<Careful>(plan, tile, memory).run();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward_kernel(const __grid_constant__ Plan plan) {
  if constexpr (ptx::kForAmpere) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const int64_t block = block_of_grid();
    if (block >= plan.blocks) return;
    const bool done = Gradients<C>(plan, RowTile::of_block<C>(plan, block), memory).run();
    if constexpr (!C::kCareful) {
      if (!done) start_over<C>(plan, memory);
    }
  }
}

}  // namespace selfattn::cuda::sm80::backward
