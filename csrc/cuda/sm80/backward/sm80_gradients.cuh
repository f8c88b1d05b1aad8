// The backward of one side: a block owns queries or keys, and tiles of the others pass by.
//
// For each pair of tiles the weights and the gradients of the scores are worked out anew, from
//
//   s = own qk, passing qk: q k        dp = own vo, passing vo: dO v
//
// so that blocks have no sums to share. The rows of all products are what the block owns: so weights and
// gradients leave mma in the layout that the sums over the columns need, and never leave the registers.
//
// One tile of each passing operand is in shared memory. That of vo is loaded while that of qk is accumulated,
// and that of qk while the products of vo are computed.
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

  // Returns whether results were written. They are not if they are not finite, since 0 * Inf or 0 * NaN of a
  // hidden row may be the reason.
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
    // A block that met no tile has not waited for its own, and results take their place.
    ptx::copy_async_wait<0>();
    __syncthreads();
    write();
    return true;
  }

 private:
  // The lane is made anew wherever it is used: registers are scarcer than additions.
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

  // The first tile from `passing` on of which the mask shows anything to some row. Its bits are read by then.
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

  // Warps without rows help to load. Where registers are scarcest, and on the bare path, they also compute,
  // and the result is not used: see the forward's. The side of keys with 128 dims tests, since it spills if
  // all products are without a condition.
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
      __syncthreads();  // the tile of vo is there; every warp is done with that of qk
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
      // At the last barrier all warps were done with the products of vo, but not with its accumulation and
      // flags.
      if (C::kSumsVO || C::kCareful) __syncthreads();
      if (more) special_vo = load_vo<C>(plan_, work_, shared_, passing);
      ptx::copy_async_commit();
      if (has_rows()) accumulate_qk(plan_, shared_, dp_, qk_sum_);
    }
  }

  // The same for dV alone, which needs no dp: the order is the forward's.
  __device__ __forceinline__ void pass_values() {
    static_assert(!C::kFloat32 || C::kNeedsDP, "float32 sums both at once");
    Passing passing = find(work_.first_passing());
    if (work_.holds(passing)) load_qk<C>(plan_, work_, shared_, passing);
    ptx::copy_async_commit();
    while (work_.holds(passing)) {
      ptx::copy_async_wait<0>();
      __syncthreads();  // the tile of qk is there; every warp is done with that of vo
      load_vo<C>(plan_, work_, shared_, passing);
      ptx::copy_async_commit();
      if (has_rows()) multiply_qk(plan_, shared_, s_);
      if (C::kCareful) ptx::copy_async_wait<0>();
      attend(passing, false);
      passing = find(work_.next(passing));
      ptx::copy_async_wait<0>();
      __syncthreads();  // the tile of vo is there; every warp is done with that of qk
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

  // Turns products into weights and gradients. The terms of numbers that products cannot take are added here,
  // one by one; in the tiles they are zero.
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

// Computes the tile again if NaN or Inf showed. That is rare, and a function of its own, so that it takes no
// registers from the kernel.
template <class C>
__device__ SELFATTN_CALLED void start_over(const Plan& plan, unsigned char* memory) {
  using Careful = typename C::Careful;
  static_assert(Careful::kThreads == C::kThreads && C::kRows % Careful::kRows == 0 &&
                    SharedLayout<Careful>::kBytes <= SharedLayout<C>::kBytes,
                "the same block can do it all again");
#pragma unroll 1
  for (int part = 0; part < C::kRows / Careful::kRows; ++part) {
    // Its numbers are copied one by one: a copy of the struct would also read its padding, which nothing
    // writes.
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
