// Copies of tiles from global to shared memory. What lies beyond the tensor or its dim becomes zero.
#pragma once

#include "../common/element.cuh"
#include "../mma/non_finite.cuh"
#include "../mma/pieces.cuh"
#include "../mma/tile_share.cuh"
#include "sm80_shared_memory.cuh"

namespace selfattn::cuda::sm80 {

using mma::Plan;
using mma::RowOf;
using mma::TileShare;

// Copies the chunk of 16 bytes that begins at `column` of a row element by element: for rows that are not
// aligned or end within a chunk.
template <class Storage>
__device__ __forceinline__ void copy_elements(unsigned char* shared, const Storage* row, int column,
                                              int dim) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(Storage));
  auto* to = reinterpret_cast<Storage*>(shared);
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) to[i] = column + i < dim ? row[column + i] : Storage(0);
}

template <class Storage>
constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Storage));

// The place where a chunk of a tile of keys or values arrives: for 16-bit elements in the swizzled tile, for
// float32 in the staging area, where every thread finds its own chunks again.
template <class C>
__device__ __forceinline__ int arrival(int row, int chunk) {
  return C::kFloat32 ? row * (C::kDim * 4) + chunk * 16 : Swizzle<C::kDim>::offset(row, chunk);
}

// Starts to copy this thread's chunks of a row, or zeros. The first of them is at `from` and goes to `to`.
template <class C, class Share, class Storage>
__device__ __forceinline__ void start_row(unsigned char* to, const Share& share, const Storage* from,
                                          bool exists, int dim) {
#pragma unroll
  for (int i = 0; i < Share::kPerLane; ++i) {
    const int column = (share.lane + i * Share::kLanes) * kPerChunk<Storage>;
    ptx::copy_async_16(to + i * Share::kLanes * 16, from + i * Share::kLanes * kPerChunk<Storage>,
                       exists && column < dim);
  }
}

// Copies this thread's chunks of a row element by element.
template <class C, class Share, class Storage>
__device__ __forceinline__ void copy_row(unsigned char* shared, const Share& share, int r, const Storage* row,
                                         bool exists, int dim) {
#pragma unroll 1
  for (int chunk = share.lane; chunk < C::kDim / kPerChunk<Storage>; chunk += Share::kLanes) {
    copy_elements(shared + arrival<C>(r, chunk), row, chunk * kPerChunk<Storage>, exists ? dim : 0);
  }
}

// Starts to copy this thread's rows of a tile, 16 bytes at a time; its first chunk is at `from`. kFull: all
// rows of the tile exist, otherwise `count` of them.
template <class C, bool kFull, class Share, class Storage>
__device__ __forceinline__ void start_vectors(unsigned char* shared, const Share& share, const Storage* from,
                                              int64_t stride, int count, int dim) {
  unsigned char* to = shared + arrival<C>(share.row, share.lane);
#pragma unroll
  for (int pass = 0; pass < Share::kPasses; ++pass, from += Share::kStep * stride) {
    const int r = share.row + pass * Share::kStep;
    if (Share::beyond(pass, r)) break;
    start_row<C>(to + pass * Share::kStep * C::kDim * static_cast<int>(sizeof(Storage)), share, from,
                 kFull || r < count, dim);
  }
}

// Starts to copy `count` rows of a matrix from `first` on, and zeros for the rest of the tile.
template <class C, int kRowCount, class Storage>
__device__ __forceinline__ void start_rows(unsigned char* shared, const Storage* matrix, int64_t stride,
                                           int first, int count, int dim, bool vectors) {
  using Share = TileShare<C, kRowCount, C::kDim* static_cast<int>(sizeof(Storage)) / 16>;
  const Share share;
  const Storage* row = matrix + static_cast<uint32_t>(first + share.row) * stride;
  if (C::kBare || vectors) {
    start_vectors<C, false>(shared, share, row + share.lane * kPerChunk<Storage>, stride, count, dim);
  } else {
#pragma unroll 1
    for (int r = share.row; r < kRowCount; r += Share::kStep, row += Share::kStep * stride) {
      copy_row<C>(shared, share, r, row, r < count, dim);
    }
  }
}

// Keys or values, from one of them on.
struct KeyRows {
  const View& view;
  const void* first;  // key 0: first_key or first_value of Work
  int first_key;
  int dim;
  bool vectors;  // rows can be read 16 bytes at a time
};

// The same for keys or values in pages. Each lane looks up one row of its warp's and tells the others where
// it is, so that each row costs one division and one look at the table. Collective.
template <class C, class Storage>
__device__ __forceinline__ void start_paged_rows(unsigned char* shared, const AttentionParams& p,
                                                 const Work<C>& work, const KeyRows& rows) {
  using Share = TileShare<C, C::kKeys, C::kDim* static_cast<int>(sizeof(Storage)) / 16>;
  const Share share;
  const int count = work.keys - rows.first_key;
  const auto* head = static_cast<const Storage*>(rows.first);
  if (C::kBare || rows.vectors) {
    constexpr int kAtOnce = kWarp / Share::kLanes;  // rows of a warp
    static_assert(Share::kPasses * kAtOnce <= kWarp && C::kKeys % Share::kStep == 0,
                  "a row for each lane, and no pass goes beyond the tile");
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int row_of_lane = share.row - lane / Share::kLanes + lane % kAtOnce + lane / kAtOnce * Share::kStep;
    const int key = min(rows.first_key + row_of_lane, work.keys - 1);
    const PagedRow at = paged_row(p.pages, work.batch, static_cast<uint32_t>(key));
    const int64_t offset = at.page * rows.view.stride[0] + at.row * rows.view.stride[2];
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      const int r = share.row + pass * Share::kStep;
      const int64_t of_row = __shfl_sync(kWholeWarp, offset, pass * kAtOnce + lane / Share::kLanes);
      start_row<C>(shared + arrival<C>(r, share.lane), share, head + of_row + share.lane * kPerChunk<Storage>,
                   r < count, rows.dim);
    }
  } else {
#pragma unroll 1
    for (int r = share.row; r < C::kKeys; r += Share::kStep) {
      const int key = min(rows.first_key + r, work.keys - 1);
      copy_row<C>(shared, share, r, mma::key_row<Storage>(p, rows.view, rows.first, work, key), r < count,
                  rows.dim);
    }
  }
}

// Starts to copy a tile of keys or values of the block's head.
template <class C, class Storage>
__device__ __forceinline__ void start_keys(unsigned char* shared, const AttentionParams& p,
                                           const Work<C>& work, const KeyRows& rows) {
  if (p.pages.table != nullptr) {
    start_paged_rows<C, Storage>(shared, p, work, rows);
  } else {
    start_rows<C, C::kKeys>(shared, static_cast<const Storage*>(rows.first), rows.view.stride[2],
                            rows.first_key, work.keys - rows.first_key, rows.dim, rows.vectors);
  }
}

// A thread's part of tiles of keys or values that pass by on the bare path, last to first. It keeps the
// address of its first chunk and moves it on, since 64-bit products for every tile would keep the warps from
// their matrix products. If registers are even scarcer, it works the address out (kParks).
template <class C, class Storage>
class PassingRows {
 public:
  __device__ __forceinline__ void begin(const KeyRows& rows) {
    const Share share;
    from_ = static_cast<const Storage*>(rows.first) +
            static_cast<uint32_t>(rows.first_key + share.row) * rows.view.stride[2] +
            share.lane * kPerChunk<Storage>;
  }
  // Starts to copy the first tile, or the one before the last copied. kFull: all its rows exist.
  template <bool kFull>
  __device__ __forceinline__ void start(unsigned char* shared, const KeyRows& rows, const Work<C>& work) {
    const int64_t stride = rows.view.stride[2];
    if constexpr (C::kParks) begin(rows);
    start_vectors<C, kFull>(shared, Share(), from_, stride, kFull ? 0 : work.keys - rows.first_key, rows.dim);
    from_ -= C::kKeys * stride;
  }

 private:
  using Share = TileShare<C, C::kKeys, C::kDim / kPerChunk<Storage>>;
  const Storage* from_;
};

// Stores the pieces of four numbers in their planes. Returns whether a number has none; with kLeaveOut it
// becomes zero.
template <class C, bool kLeaveOut>
__device__ __forceinline__ bool store_pieces(unsigned char* planes, int plane_bytes, int row, int chunk,
                                             float4 x) {
  const bool special = mma::has_no_pieces(x.x) || mma::has_no_pieces(x.y) || mma::has_no_pieces(x.z) ||
                       mma::has_no_pieces(x.w);
  if (kLeaveOut && special) {
    if (mma::has_no_pieces(x.x)) x.x = 0.0f;
    if (mma::has_no_pieces(x.y)) x.y = 0.0f;
    if (mma::has_no_pieces(x.z)) x.z = 0.0f;
    if (mma::has_no_pieces(x.w)) x.w = 0.0f;
  }
  unsigned char* to = planes + Swizzle<C::kDim>::offset(row, chunk / 2) + chunk % 2 * 8;
#pragma unroll
  for (int piece = 0; piece < C::kPieces; ++piece) {
    uint2 pairs;
    pairs.x = mma::take_piece(x.x, x.y);
    pairs.y = mma::take_piece(x.z, x.w);
    *reinterpret_cast<uint2*>(to + piece * plane_bytes) = pairs;
  }
  return special;
}

// Loads four numbers of a row that has `columns` of them, and zeros beyond.
__device__ __forceinline__ float4 load_four(const float* row, int column, int columns, bool vectors) {
  float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
  if (vectors) {
    if (column < columns) x = *reinterpret_cast<const float4*>(row + column);
  } else {
    if (column < columns) x.x = row[column];
    if (column + 1 < columns) x.y = row[column + 1];
    if (column + 2 < columns) x.z = row[column + 2];
    if (column + 3 < columns) x.w = row[column + 3];
  }
  return x;
}

// Starts to copy the tile of queries, once for a block. float32 is split into pieces on the way. Returns
// whether this thread met a number without pieces.
template <class C>
__device__ __forceinline__ bool start_queries(const Plan& plan, const Work<C>& work,
                                              const SharedMemory<C>& shared) {
  constexpr int kPerChunk = C::kFloat32 ? 4 : 8;
  using Share = TileShare<C, C::kRows, C::kDim / kPerChunk>;
  using Storage = typename Element<C::kDType>::Storage;
  const AttentionParams& p = plan.params;
  const int dim = static_cast<int>(p.head_dim);
  const Share share;
  bool any = false;
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int r = share.row + pass * Share::kStep;
    const bool beyond = Share::beyond(pass, r);
    const RowOf row = work.row(r);
    const Storage* from = static_cast<const Storage*>(p.query.data) + work.offset(p.query, row);
    bool special = false;
#pragma unroll 1
    for (int i = 0; i < Share::kPerLane && !beyond; ++i) {
      const int chunk = C::kFloat32 ? share.chunk(i) : share.lane + i * Share::kLanes;
      const int column = chunk * kPerChunk;
      const int columns = r < work.rows ? dim : 0;  // that exist
      if constexpr (C::kFloat32) {
        const float4 x = load_four(from, column, columns, plan.query_vectors);
        special |= store_pieces<C, false>(shared.queries(), SharedLayout<C>::kQueryPlane, r, chunk, x);
      } else {
        unsigned char* to = shared.queries() + Swizzle<C::kDim>::offset(r, chunk);
        if (C::kBare || plan.query_vectors) {
          ptx::copy_async_16(to, from + column, column < columns);
        } else {
          copy_elements(to, from, column, columns);
        }
      }
    }
    if constexpr (C::kFloat32) {
      const bool flag = share.any_of_row(special);
      if (share.lane == 0 && !beyond) shared.query_flags()[r] = flag;
      any |= flag;
    }
  }
  return any;
}

// Makes pieces of the staged tile. Each thread takes the chunks that it copied itself, so that no barrier is
// needed before. Marks rows with numbers that have no pieces. Returns whether this thread met one.
template <class C, bool kLeaveOut>
__device__ __forceinline__ bool split_staged(const SharedMemory<C>& shared, unsigned char* planes,
                                             unsigned char* flags) {
  using Share = TileShare<C, C::kKeys, C::kDim / 4>;
  const Share share;
  return share.flag_rows(flags, [&](int r) {
    bool special = false;
#pragma unroll
    for (int i = 0; i < Share::kPerLane; ++i) {
      const int chunk = share.chunk(i);
      const float4 x = *reinterpret_cast<const float4*>(shared.staging() + arrival<C>(r, chunk));
      special |= store_pieces<C, kLeaveOut>(planes, SharedLayout<C>::kTilePlane, r, chunk, x);
    }
    return special;
  });
}

// Zeroes what is not finite in the part of the tile that this thread copied. It has waited for its copies.
template <class C>
__device__ __forceinline__ void clear_non_finite_values(const SharedMemory<C>& shared) {
  using Share = TileShare<C, C::kKeys, C::kDim / 8>;
  const Share share;
#pragma unroll 1
  for (int r = share.row; r < C::kKeys; r += Share::kStep) {
#pragma unroll 1
    for (int chunk = share.lane; chunk < C::kDim / 8; chunk += Share::kLanes) {
      auto* elements = reinterpret_cast<uint16_t*>(shared.values() + Swizzle<C::kDim>::offset(r, chunk));
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        if (mma::is_non_finite<C::kDType>(elements[i])) elements[i] = 0;
      }
    }
  }
}

}  // namespace selfattn::cuda::sm80
