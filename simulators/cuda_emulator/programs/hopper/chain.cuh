// A chain of products that overlap, for hopper_results.cu.
#pragma once

#include <cstring>

#include "cuda/common/ptx_sm80.cuh"
#include "matrices.cuh"

namespace hopper {

// Computes o = (q k^T) v by tiles of 64 keys. One group copies; two others have 64 queries each and take
// turns. The product for the next tile runs at the same time as the current one.
constexpr int kGroups = 3;
constexpr int kTiles = 5;
constexpr int kStages = 2;
constexpr int kTileBytes = kRows * kRowBytes;

struct Chain {
  TensorMap q, k, v;
  float* o;
};

struct ChainMemory {
  unsigned char *q, *k, *v;  // two tiles each: q has one per group, k and v one per stage
  uint64_t *q_full, *k_full, *v_full, *k_empty, *v_empty;
};

constexpr size_t kChainBytes = kAlignment + 6 * kTileBytes + (1 + 4 * kStages) * sizeof(uint64_t);

__device__ ChainMemory chain_memory(unsigned char* start) {
  unsigned char* const q = aligned(start);
  auto* const barriers = reinterpret_cast<uint64_t*>(q + 6 * kTileBytes);
  return {q,
          q + 2 * kTileBytes,
          q + 4 * kTileBytes,
          barriers,
          barriers + 1,
          barriers + 1 + kStages,
          barriers + 1 + 2 * kStages,
          barriers + 1 + 3 * kStages};
}

__device__ void copy_chain(const Chain& chain, const ChainMemory& memory) {
  ptx::barrier_arrive_expecting(memory.q_full, 2 * kTileBytes);
  for (int group = 0; group < 2; ++group)
    ptx::copy_box_async(memory.q + group * kTileBytes, &chain.q, memory.q_full, 0, group * kRows, 0, 0);
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    const uint32_t parity = tile / kStages % 2;
    ptx::barrier_wait(&memory.k_empty[stage], parity ^ 1);
    ptx::barrier_arrive_expecting(&memory.k_full[stage], kTileBytes);
    ptx::copy_box_async(memory.k + stage * kTileBytes, &chain.k, &memory.k_full[stage], 0, tile * kRows, 0,
                        0);
    ptx::barrier_wait(&memory.v_empty[stage], parity ^ 1);
    ptx::barrier_arrive_expecting(&memory.v_full[stage], kTileBytes);
    ptx::copy_box_async(memory.v + stage * kTileBytes, &chain.v, &memory.v_full[stage], 0, tile * kRows, 0,
                        0);
  }
}

using Tile = float[kRows / 8][4];
using Fragments = uint32_t[kRows / kDepthOfProduct][4];

__device__ void to_fragments(const Tile& s, Fragments& p) {
#pragma unroll
  for (int n = 0; n < kRows / kDepthOfProduct; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      p[n][r] = ptx::pack_float16(s[2 * n + r / 2][r % 2 * 2], s[2 * n + r / 2][r % 2 * 2 + 1]);
  }
}

__device__ __forceinline__ void begin_scores(Tile& s, const ChainMemory& memory, int group, int tile) {
  const int stage = tile % kStages;
  ptx::barrier_wait(&memory.k_full[stage], tile / kStages % 2);
  ptx::products_fence();
#pragma unroll
  for (int n = 0; n < kRows / kDepthOfProduct; ++n) {
    ptx::product_async<false, kRows, false, false>(
        s, ptx::matrix_by_columns(memory.q + group * kTileBytes, kRows, 0, n * kDepthOfProduct),
        ptx::matrix_by_columns(memory.k + stage * kTileBytes, kRows, 0, n * kDepthOfProduct), n > 0);
  }
  ptx::products_commit();
}

__global__ void __launch_bounds__(kGroups* kThreads, 1) multiply_chain(const __grid_constant__ Chain chain) {
  SELFATTN_DYNAMIC_SHARED(start);
  const ChainMemory memory = chain_memory(start);
  if (threadIdx.x == 0) {
    ptx::barrier_init(memory.q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&memory.k_full[stage], 1);
      ptx::barrier_init(&memory.v_full[stage], 1);
      ptx::barrier_init(&memory.k_empty[stage], 2);
      ptx::barrier_init(&memory.v_empty[stage], 2);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kThreads) {
    ptx::give_up_registers<40>();
    if (threadIdx.x == 0) copy_chain(chain, memory);
    return;
  }
  ptx::take_registers<232>();
  const int group = static_cast<int>(threadIdx.x) / kThreads - 1;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  constexpr int kTurn = 1;  // the first of two barriers, which say whose turn it is
  if (group == 1) ptx::arrive_threads(kTurn, 2 * kThreads);

  Tile s, o{};
  Fragments p, next;
  ptx::barrier_wait(memory.q_full, 0);
  begin_scores(s, memory, group, 0);
  ptx::products_wait<0>();
  ptx::products_touch(s);
  if (thread == 0) ptx::barrier_arrive(&memory.k_empty[0]);
  to_fragments(s, p);
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages, next_stage = (tile + 1) % kStages;
    const bool is_last = tile + 1 == kTiles;
    ptx::sync_threads(kTurn + group, 2 * kThreads);
    if (!is_last) begin_scores(s, memory, group, tile + 1);
    ptx::barrier_wait(&memory.v_full[stage], tile / kStages % 2);
    ptx::products_fence();
#pragma unroll
    for (int n = 0; n < kRows / kDepthOfProduct; ++n) {
      ptx::product_async<false, kRows, true>(
          o, p[n], ptx::matrix_by_rows(memory.v + stage * kTileBytes, kRows, n * kDepthOfProduct, 0), true);
    }
    ptx::products_commit();
    if (group == 0 || !is_last) ptx::arrive_threads(kTurn + 1 - group, 2 * kThreads);
    if (!is_last) {
      ptx::products_wait<1>();
      ptx::products_touch(s);
      if (thread == 0) ptx::barrier_arrive(&memory.k_empty[next_stage]);
      to_fragments(s, next);
    }
    ptx::products_wait<0>();
    ptx::products_touch(o);
    if (thread == 0) ptx::barrier_arrive(&memory.v_empty[stage]);
    if (!is_last) std::memcpy(p, next, sizeof(p));
  }
  const int lane = thread % 32, first_row = group * kRows + thread / 32 * 16;
  for (int tile = 0; tile < kRows / 8; ++tile) {
    for (int r = 0; r < 4; ++r)
      chain.o[(first_row + lane / 4 + 8 * (r / 2)) * kRows + 8 * tile + 2 * (lane % 4) + r % 2] = o[tile][r];
  }
}

}  // namespace hopper
