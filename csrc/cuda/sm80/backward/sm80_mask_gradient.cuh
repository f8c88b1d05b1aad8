// The gradient of a float mask: a block owns a region, and tiles of scores pass by.
//
// ../../mask/mask_regions.h defines the regions. Gradients are added up where they are worked out, in
// registers, element by element. If the mask does not tell queries or keys apart, their sums are taken once
// for several tiles.
#pragma once

#include "../../function/launch_with_function.cuh"
#include "../../mask/line_totals.cuh"
#include "../../mma/backward/weigh.cuh"
#include "backward_loads.cuh"
#include "products.cuh"
#include "special_products.cuh"

namespace selfattn::cuda::sm80::backward {

using mma::Lane;
using mma::Scores;
using mma::backward::Passing;
using mma::backward::Place;
using mma::backward::Plan;
using mma::backward::RowTile;

template <class C>
class MaskGradient {
  using Layout = SharedLayout<C>;
  static_assert(C::kSide == Side::kMask);
  // One column more, so that neither rows nor columns are read from few banks.
  static constexpr int kStride = C::kColumns + 1;
  static_assert(C::kRows * kStride * 4 <= Layout::kStatistics - Layout::kTiles,
                "sums take the place of the tiles");

 public:
  __device__ __forceinline__ MaskGradient(const Plan& plan, const MaskRegions& regions, unsigned char* memory)
      : plan_(plan), p_(plan.params), regions_(regions), shared_{memory}, work_(shared_.work()) {}

  __device__ __forceinline__ void run(int64_t block) {
    const MaskRegions::Tile corner = regions_.region(block / regions_.splits);
    const int64_t from = block % regions_.splits * regions_.split_items;
    const int64_t to = min(from + regions_.split_items, regions_.items);
    const LineTotals totals(regions_, shared_.totals());
    mma::clear(sum_.at);
    int tiles = 0;  // how many sum_ holds
#pragma unroll 1
    for (int64_t n = from; n < to; ++n) {
      if (add(regions_.item(corner, n))) ++tiles;
      if (n + 1 < to && (regions_.is_tile() || tiles < LineTotals::kTiles)) continue;
      put_sums();
      if (regions_.is_tile()) break;
      totals.add([&](int row, int column) { return shared_.exchange()[row * kStride + column]; });
      mma::clear(sum_.at);
      tiles = 0;
      row_tile_ = column_tile_ = -1;
    }
    totals.finish();
    write(corner, totals, block);
  }

 private:
  static __device__ __forceinline__ Lane<C> lane() { return Lane<C>(); }

  // Adds an item. Returns whether any query may see it, which does not depend on the other sequences of a
  // batch.
  __device__ __forceinline__ bool add(const MaskRegions::Tile& item) {
    const int first_row = static_cast<int>(item.row_tile) * C::kRows;
    const Sequence sequence = sequence_of(p_, item.batch);
    const int rows = min(static_cast<int>(sequence.queries) - first_row, C::kRows);
    if (rows <= 0) return false;
    const Passing passing{static_cast<int>(item.head), static_cast<int>(item.column_tile) * C::kColumns};
    const KeyRange range = visible_keys(positions_of(p_, sequence), first_row, first_row + rows - 1);
    if (passing.first >= range.end || passing.first + C::kColumns <= range.begin) return false;

    __syncthreads();  // every warp is done with the item before
    if (threadIdx.x == 0) {
      shared_.work() = Work<C>(plan_, RowTile{item.batch * p_.heads + item.head, first_row});
    }
    __syncthreads();
    if (hides_all(mma::backward::seen_tile(work_, p_.function, passing))) return false;
    if (p_.mask.data != nullptr) {
      const Lane<C> lane_of_mask;
      if (!__syncthreads_or(mask_.load(Place<C>{{plan_, work_, lane_of_mask}, passing}))) return false;
    }

    // Neighbouring items often share the queries or the keys.
    const int64_t row_tile = (item.batch * p_.heads + item.head) * regions_.count[2] + item.row_tile;
    const int64_t column_tile =
        (item.batch * p_.kv_heads + work_.kv_head) * regions_.count[3] + item.column_tile;
    if (row_tile != row_tile_) own_special_ = load_own<C>(plan_, work_, shared_);
    if (column_tile != column_tile_) {
      passing_special_ = load_qk<C>(plan_, work_, shared_, passing);
      passing_special_ |= load_vo<C>(plan_, work_, shared_, passing);
    }
    row_tile_ = row_tile;
    column_tile_ = column_tile;
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    const bool special = __syncthreads_or(own_special_ || passing_special_) != 0;
    if (lane().first_row >= rows) return true;

    Scores<C> s, ds;
    multiply_qk(plan_, shared_, s);
    multiply_vo(plan_, shared_, ds);
    if constexpr (C::kFloat32) {
      if (special) replace_special_products(Place<C>{{plan_, work_, lane()}, passing}, shared_, s, ds);
    }
    mma::backward::Slopes<C> none;
    mma::backward::weigh(Place<C>{{plan_, work_, lane()}, passing}, shared_, mask_, none, /*careful=*/true, s,
                         ds);
    mma::backward::for_each_pair(sum_, ds,
                                 [](int, int, int, int, float& sum, float& gradient) { sum += gradient; });
    return true;
  }

  // Puts the sums into shared memory, in place of the tiles.
  __device__ __forceinline__ void put_sums() {
    float* sums = shared_.exchange();
    const Lane<C> own;
    __syncthreads();  // every warp is done with the tiles
    mma::for_each_element(sum_.at, [&](int strip, int half, int tile, int i, float& sum) {
      sums[own.row(strip, half) * kStride + own.column(tile) + i] = sum;
    });
    __syncthreads();
  }

  __device__ __forceinline__ void write(const MaskRegions::Tile& corner, const LineTotals& totals,
                                        int64_t block) const {
    const float* sums = shared_.exchange();
    const View& gradient = plan_.arguments.grad_mask;
    const int columns = regions_.columns(), count = regions_.rows() * columns;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < count; n += C::kThreads) {
      const int row = n / columns, column = n % columns;
      const double sum =
          regions_.is_tile() ? static_cast<double>(sums[row * kStride + column]) : totals.element(n);
      if (regions_.partial != nullptr) {
        regions_.partial[block * count + n] = sum;
        continue;
      }
      const int64_t query = corner.row_tile * C::kRows + row, key = corner.column_tile * C::kColumns + column;
      if (query >= p_.queries || key >= p_.keys) continue;
      store_element(gradient.data, gradient.dtype,
                    gradient.offset(corner.batch, corner.head, query) + key * gradient.stride[3], sum);
    }
  }

  const Plan& plan_;
  const AttentionParams& p_;
  const MaskRegions& regions_;
  const SharedMemory<C> shared_;
  const Work<C>& work_;                       // lies in shared memory, for one item after another
  int64_t row_tile_ = -1, column_tile_ = -1;  // those in shared memory
  bool own_special_ = false, passing_special_ = false;
  mma::backward::MaskBits<C> mask_;
  Scores<C> sum_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    mask_gradient_kernel(const Plan plan, const MaskRegions regions) {
  if constexpr (ptx::kForAmpere) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const int64_t block = block_of_grid();
    if (block < regions.blocks()) MaskGradient<C>(plan, regions, memory).run(block);
  }
}

template <DType kDType, int kDim>
using MaskConfig = Config<kDType, kDim, Side::kMask, Path::kOptions>;

template <DType kDType, int kDim>
MaskRegions regions_of_mask(const AttentionParams& p, const BackwardArguments& a) {
  using C = MaskConfig<kDType, kDim>;
  return mask_regions(p, a, C::kRows, C::kColumns);
}

template <DType kDType, int kDim>
void run_mask(const AttentionParams& p, const BackwardArguments& a, const Statistics& statistics,
              void* partial, const Launch& where) {
  using C = MaskConfig<kDType, kDim>;
  MaskRegions regions = regions_of_mask<kDType, kDim>(p, a);
  if (regions.splits > 1) regions.partial = static_cast<double*>(partial);
  if (regions.blocks() == 0) return;
  const Plan plan = mma::backward::plan_side(p, a, statistics, C::kRows, C::kOwnsQueries);
  launch_with_function(p.function, &mask_gradient_kernel<C>, grid_of(regions.blocks()), dim3(C::kThreads),
                       SharedLayout<C>::kBytes, where.stream, plan, regions);
  join_mask_splits(p, a, regions, where);
}

}  // namespace selfattn::cuda::sm80::backward
