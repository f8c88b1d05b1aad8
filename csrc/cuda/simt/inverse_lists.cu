// Inverts lists of selected keys by counting.
//
// A warp owns a chunk of the rows that an inverse is made of. It counts how often they hold each block; the
// counts of all chunks give the place of each chunk's rows among those of a block; and it goes through its
// rows again and puts them there. A row holds a block once, so that lanes that read one row never meet. The
// result depends on the lists alone, and takes no atomics.
#include "inverse_lists.h"

#include <algorithm>

#include "../common/grid.cuh"

namespace selfattn::cuda::simt {

namespace {

constexpr int kThreads = 256;
// The chunks take as much memory as the lists, and at most so many steps of the kernel that adds them up.
constexpr int64_t kMostChunks = 1024;

int64_t bytes_of(int64_t count, size_t size) {
  constexpr int64_t kAlignment = 256;
  return round_up(count * static_cast<int64_t>(size), kAlignment);
}

// Inverse `index` of all of them.
__device__ __forceinline__ InverseOfHead inverse_of(const InverseLists& to, const AttentionParams& p,
                                                    int64_t index) {
  return {to, p, index / to.heads, index % to.heads * p.selection.heads_per_list};
}

// Calls visit(row, block) for the numbers of a chunk's rows, a row at a time.
template <class Visit>
__device__ __forceinline__ void for_each_number(const InverseOfHead& to, int64_t longest, int64_t chunk,
                                                int64_t chunks, const Visit& visit) {
  const int64_t end = (chunk + 1) * to.list_rows / chunks;
  for (int64_t row = chunk * to.list_rows / chunks; row < end; ++row) {
    for (int64_t i = threadIdx.x; i < longest; i += kWarp) {
      const int32_t block = to.lists[row * longest + i];
      if (block < 0) break;
      if (block < to.blocks) visit(row, block);
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kWarp)
    count_rows_kernel(const __grid_constant__ AttentionParams p, const InverseLists lists,
                      const int64_t first_block) {
  const int64_t index = first_block + blockIdx.x, chunk = index % lists.chunks;
  const InverseOfHead to = inverse_of(lists, p, index / lists.chunks);
  int64_t* const counts = to.places + chunk * to.blocks;
  for (int64_t block = threadIdx.x; block < to.blocks; block += kWarp) counts[block] = 0;
  __syncwarp();
  for_each_number(to, p.selection.longest, chunk, lists.chunks,
                  [&](int64_t, int32_t block) { ++counts[block]; });
}

// Turns counts into places. A block owns an inverse, and a thread every 256th block of keys.
__global__ void __launch_bounds__(kThreads)
    add_counts_kernel(const __grid_constant__ AttentionParams p, const InverseLists lists,
                      const int64_t first_block) {
  SELFATTN_DYNAMIC_SHARED(memory);
  int64_t* const sums = reinterpret_cast<int64_t*>(memory);
  const InverseOfHead to = inverse_of(lists, p, first_block + blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  int64_t before = 0;
  for (int64_t first = 0; first < to.blocks; first += kThreads) {
    const int64_t block = first + thread;
    const bool exists = block < to.blocks;
    int64_t own = 0;
    for (int64_t chunk = 0; exists && chunk < lists.chunks; ++chunk) {
      own += to.places[chunk * to.blocks + block];
    }
    sums[thread] = own;
    for (int step = 1; step < kThreads; step *= 2) {
      __syncthreads();
      const int64_t added = thread >= step ? sums[thread - step] : 0;
      __syncthreads();
      sums[thread] += added;
    }
    __syncthreads();
    int64_t place = before + sums[thread] - own;
    before += sums[kThreads - 1];
    __syncthreads();
    if (!exists) continue;
    to.starts[block] = place;
    for (int64_t chunk = 0; chunk < lists.chunks; ++chunk) {
      int64_t& of_chunk = to.places[chunk * to.blocks + block];
      const int64_t count = of_chunk;
      of_chunk = place;
      place += count;
    }
  }
  if (thread == 0) to.starts[to.blocks] = before;
}

__global__ void __launch_bounds__(kWarp)
    put_rows_kernel(const __grid_constant__ AttentionParams p, const InverseLists lists,
                    const int64_t first_block) {
  const int64_t index = first_block + blockIdx.x, chunk = index % lists.chunks;
  const InverseOfHead to = inverse_of(lists, p, index / lists.chunks);
  int64_t* const places = to.places + chunk * to.blocks;
  for_each_number(to, p.selection.longest, chunk, lists.chunks, [&](int64_t row, int32_t block) {
    const int64_t place = places[block]++;
    // Lists that hold a block twice, which nobody has checked, must not lead outside of the array.
    if (place < to.numbers) to.rows[place] = static_cast<int32_t>(row);
  });
}

}  // namespace

InverseLists inverse_lists_in(void* memory, const AttentionParams& p) {
  const Selection& s = p.selection;
  InverseLists lists;
  lists.elements = s.stride[0] != 0 || p.sequences.any() ? p.batch : 1;
  lists.heads = s.stride[1] != 0 ? p.heads / s.heads_per_list : 1;
  lists.starts_of_head = p.sequences.key_starts != nullptr
                             ? p.sequences.key_rows / s.key_size + 2 * lists.elements
                             : lists.elements * (divide_up(p.keys, s.key_size) + 1);
  lists.numbers_of_head = (p.sequences.query_starts != nullptr ? 1 : lists.elements) * s.rows * s.longest;
  lists.chunks = limited(lists.numbers_of_head / larger(lists.starts_of_head, 1), 1,
                         smaller(larger(s.rows, 1), kMostChunks));
  char* at = static_cast<char*>(memory);
  lists.starts = reinterpret_cast<int64_t*>(at);
  at += bytes_of(lists.heads * lists.starts_of_head, sizeof(int64_t));
  lists.places = reinterpret_cast<int64_t*>(at);
  at += bytes_of(lists.heads * lists.starts_of_head * lists.chunks, sizeof(int64_t));
  lists.rows = reinterpret_cast<int32_t*>(at);
  return lists;
}

size_t inverse_lists_bytes(const AttentionParams& p) {
  const InverseLists lists = inverse_lists_in(nullptr, p);
  const int64_t starts = lists.heads * lists.starts_of_head;
  return static_cast<size_t>(bytes_of(starts, sizeof(int64_t)) +
                             bytes_of(starts * lists.chunks, sizeof(int64_t)) +
                             bytes_of(lists.heads * lists.numbers_of_head, sizeof(int32_t)));
}

void build_inverse_lists(const AttentionParams& p, const InverseLists& lists, const Launch& where) {
  const int64_t inverses = lists.elements * lists.heads;
  launch_blocks(&count_rows_kernel, inverses * lists.chunks, kWarp, 0, where, p, lists);
  launch_blocks(&add_counts_kernel, inverses, kThreads, kThreads * sizeof(int64_t), where, p, lists);
  launch_blocks(&put_rows_kernel, inverses * lists.chunks, kWarp, 0, where, p, lists);
}

}  // namespace selfattn::cuda::simt
