// The warp that loads what other warps compute with.
//
// It takes items of work from a counter, finds the tiles of keys that a mask shows, and starts the copies.
#pragma once

#include "../mma/non_finite.cuh"
#include "mask_tiles.cuh"
#include "sm90_plan.h"
#include "sm90_shared_memory.cuh"

namespace selfattn::cuda::sm90 {

template <class C>
class Producer {
 public:
  __device__ __forceinline__ Producer(const Plan& plan, const SharedMemory<C>& shared)
      : plan_(plan), p_(plan.params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    int item = 0;
    for (; take(item); ++item) bring(item);
    // take() has waited until all previous items are done.
    if (lane() == 0) {
      shared_.work(item).rows = -1;  // there is no such item
      ptx::barrier_arrive(&control().query_full);
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  __device__ __forceinline__ Control<C>& control() const { return shared_.control_again(); }

  // Finds the next item of work. An item that held NaN or infinities comes once more, after the next one.
  // Items that the longest sequence has need not exist in others, and sequences of few queries are left to
  // another kernel.
  __device__ __forceinline__ bool take(int item) {
    for (;;) {
      bool careful = true;
      int64_t number = item >= kItems ? repeated(item - kItems) : -1;
      if (number < 0) {
        careful = false;
        if (lane() == 0) number = static_cast<int64_t>(atomicAdd(plan_.next_item, 1ull));
        number = __shfl_sync(kWholeWarp, number, 0);
      }
      if (number >= plan_.blocks) {
        careful = true;
        number = item > 0 ? repeated(item - 1) : -1;
        if (number < 0) return false;
      }
      if (lane() == 0) {
        Work<C>& work = shared_.work(item) = Work<C>(plan_, number);
        work.careful = careful;
        control().number[item % kItems] = number;
      }
      __syncwarp();
      const Work<C>& work = shared_.work(item);
      const bool wanted = work.rows > 0 && !counts_as_few(p_, work.queries);
      __syncwarp();
      if (wanted) return true;
    }
  }

  // Waits for an earlier item. Returns its number if it must be computed once more, otherwise -1.
  __device__ __forceinline__ int64_t repeated(int earlier) {
    wait_for_warp(&control().done[earlier % kItems], earlier / kItems & 1);
    if (control().again[earlier % kItems] == 0) return -1;
    const int64_t number = control().number[earlier % kItems];
    __syncwarp();
    if (lane() == 0) control().again[earlier % kItems] = 0;
    return number;
  }

  __device__ __forceinline__ void bring(int item) {
    const Work<C>& work = shared_.work(item);
    wait_for_warp(&control().query_empty, (item & 1) ^ 1);
    start_queries(work);
    bool waits = plan_.folds;  // for the queries, whose barrier has not been signalled
    const int last = work.begin < work.end ? (work.end - 1) / C::kKeys : work.first_tile - 1;
#pragma unroll 1
    for (int tile = shown(work, last); tile >= work.first_tile; tile = shown(work, tile - 1)) {
      bring_keys(work, tile);
      if (waits) finish_queries();
      waits = false;
      bring_values(work, tile);
    }
    if (waits) finish_queries();
    if constexpr (!C::kBare) {
      wait_for_warp(&control().key_empty[keys_.stage], keys_.parity ^ 1);
      if (lane() == 0) {
        control().tile_of[keys_.stage] = -1;
        ptx::barrier_arrive(&control().key_full[keys_.stage]);
      }
      keys_.advance();
    }
  }

  // One box per head. Folded queries are copied row by row, and the first keys do not wait for that.
  __device__ __forceinline__ void start_queries(const Work<C>& work) const {
    if (plan_.folds) {
      const auto row_at = [&](int r) {
        return static_cast<const uint16_t*>(p_.query.data) + work.offset(p_.query, work.row(r));
      };
      start_rows<C::kRows>(shared_.queries(), work.rows, static_cast<int>(p_.head_dim), C::kPanels, row_at);
    } else if (lane() == 0) {
      ptx::barrier_arrive_expecting(&control().query_full, SharedLayout<C>::kQueryBytes);
      const int batch = p_.sequences.query_starts == nullptr ? work.batch : 0;
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::copy_box_async(shared_.queries() + panel * C::kRows * 128, &plan_.query.map,
                            &control().query_full, panel * 64,
                            static_cast<int>(work.query_start) + work.first_row,
                            work.first_head * plan_.query.steps_of_head, batch * plan_.query.steps_of_batch);
      }
    }
  }
  __device__ __forceinline__ void finish_queries() const {
    ptx::copy_async_wait<0>();
    show(&control().query_full);
  }

  // Counts down from `tile` to a tile of which the mask shows anything.
  __device__ __forceinline__ int shown(const Work<C>& work, int tile) const {
    if constexpr (!C::kBare) {
      if (p_.mask.data == nullptr) return tile;
      const auto row_at = [&](int n) { return work.row(n); };
      // If heads share the mask, one head's folded rows suffice.
      const int rows = p_.mask.stride[1] == 0 ? min(work.rows, work.queries) : work.rows;
      while (tile >= work.first_tile) {
        const int first_key = tile * C::kKeys, keys = min(work.keys - first_key, C::kKeys);
        if (mask_shows_any(p_.mask, plan_.mask_chunks, work.batch, rows, first_key, keys, row_at)) break;
        --tile;
      }
    }
    return tile;
  }

  __device__ __forceinline__ void bring_keys(const Work<C>& work, int tile) {
    wait_for_warp(&control().key_empty[keys_.stage], keys_.parity ^ 1);
    uint64_t* const full = &control().key_full[keys_.stage];
    unsigned char* const to = shared_.keys(keys_.stage);
    if constexpr (!C::kBare) {
      if (lane() == 0) control().tile_of[keys_.stage] = tile;
    }
    if (plan_.boxes_per_tile > 0) {
      if (lane() == 0) {
        ptx::barrier_arrive_expecting(full, SharedLayout<C>::kKeyBytes);
        copy(work, plan_.key, tile, C::kPanels, to, full);
      }
    } else {
      copy_rows(work, p_.key, work.first_key, static_cast<int>(p_.head_dim), tile, C::kPanels, to);
      show(full);
    }
    keys_.advance();
  }

  __device__ __forceinline__ void bring_values(const Work<C>& work, int tile) {
    wait_for_warp(&control().value_empty[values_.stage], values_.parity ^ 1);
    // Rows after the last key belong to another sequence, or were never written. Their weights are 0, but
    // that does not make a NaN harmless.
    const int rows = work.keys - tile * C::kKeys;
    const bool changes = work.careful || (rows < C::kKeys && !plan_.zeros_follow);
    uint64_t* const full = &control().value_full[values_.stage];
    unsigned char* const to = shared_.values(values_.stage);
    if (plan_.boxes_per_tile > 0) {
      if (lane() == 0) {
        uint64_t* const landed = changes ? &control().value_landed : full;
        ptx::barrier_arrive_expecting(landed, SharedLayout<C>::kValueBytes);
        copy(work, plan_.value, tile, C::kValuePanels, to, landed);
      }
      if (changes) {
        ptx::barrier_wait(&control().value_landed, landed_);
        landed_ ^= 1;
      }
    } else {
      copy_rows(work, p_.value, work.first_value, static_cast<int>(p_.value_dim), tile, C::kValuePanels, to);
    }
    if (changes) clear(to, rows, work.careful);
    if (changes || plan_.boxes_per_tile == 0) show(full);
    values_.advance();
  }

  // Shows the warps that compute what this warp has written to shared memory itself.
  __device__ __forceinline__ void show(uint64_t* full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::barrier_arrive(full);
  }

  // Copies a tile of keys or values in pages that boxes do not fit, a row at a time, with zeros after the
  // last key.
  __device__ __forceinline__ void copy_rows(const Work<C>& work, const View& view, const void* first, int dim,
                                            int tile, int panels, unsigned char* to) const {
    const int first_key = tile * C::kKeys;
    const auto row_at = [&](int r) {
      return mma::key_row<uint16_t>(p_, view, first, work, min(first_key + r, max(work.keys - 1, 0)));
    };
    start_rows<C::kKeys>(to, work.keys - first_key, dim, panels, row_at);
    ptx::copy_async_wait<0>();
    __syncwarp();
  }

  // Starts to copy the first `count` rows of a tile, 16 bytes at a time, to the places where a box would have
  // put them, and zeros to the places of the other rows. row_at(r) must exist for these, too.
  template <int kTileRows, class RowAt>
  __device__ __forceinline__ void start_rows(unsigned char* to, int count, int dim, int panels,
                                             const RowAt& row_at) const {
    const int chunk = lane() % 8;
#pragma unroll 1
    for (int r = lane() / 8; r < kTileRows; r += kWarp / 8) {
      const uint16_t* const row = row_at(r);
#pragma unroll 1
      for (int panel = 0; panel < panels; ++panel) {
        const int column = panel * 64 + chunk * 8;
        ptx::copy_async_16(to + (panel * kTileRows + r) * 128 + ((chunk ^ (r & 7)) << 4), row + column,
                           r < count && column < dim);
      }
    }
    ptx::copy_async_commit();
  }

  // Starts to copy a tile of keys or values.
  __device__ __forceinline__ void copy(const Work<C>& work, const MappedTensor& tensor, int tile, int panels,
                                       unsigned char* to, uint64_t* barrier) const {
    const int box_rows = C::kKeys / plan_.boxes_per_tile;
#pragma unroll 1
    for (int box = 0; box < plan_.boxes_per_tile; ++box) {
      const int key = tile * C::kKeys + box * box_rows;
      int batch = p_.sequences.key_starts == nullptr ? work.batch : 0;
      int row = static_cast<int>(work.key_start) + key;
      if (p_.pages.table != nullptr) {
        // Past the last key, reuse the last page.
        const PagedRow at =
            paged_row(p_.pages, work.batch, static_cast<uint32_t>(min(key, max(work.keys - 1, 0))));
        batch = static_cast<int>(at.page);
        row = static_cast<int>(at.row) / box_rows * box_rows;
      }
#pragma unroll 1
      for (int panel = 0; panel < panels; ++panel) {
        ptx::copy_box_async(to + (panel * C::kKeys + box * box_rows) * 128, &tensor.map, barrier, panel * 64,
                            row, work.kv_head * tensor.steps_of_head, batch * tensor.steps_of_batch);
      }
    }
  }

  // Zeroes the rows of a tile of values from `rows` on and, if `careful`, NaN and infinities in the others.
  // It goes by chunks of 16 bytes, so that the places of chunks in their row do not matter.
  __device__ __forceinline__ void clear(unsigned char* tile, int rows, bool careful) const {
    const int first = careful ? 0 : max(rows, 0) & ~3;
#pragma unroll 1
    for (int r = first + lane() / 8; r < C::kKeys; r += kWarp / 8) {
#pragma unroll 1
      for (int panel = 0; panel < C::kValuePanels; ++panel) {
        auto* const chunk = reinterpret_cast<uint16_t*>(tile + (panel * C::kKeys + r) * 128) + lane() % 8 * 8;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          if (r >= rows || (careful && mma::is_non_finite<C::kDType>(chunk[i]))) chunk[i] = 0;
        }
      }
    }
  }

  const Plan& plan_;
  const AttentionParams& p_;
  const SharedMemory<C> shared_;
  RingPosition<C::kStages> keys_, values_;
  uint32_t landed_ = 0;
};

}  // namespace selfattn::cuda::sm90
