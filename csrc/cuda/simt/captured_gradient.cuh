// The gradients of the tensors that a call's function reads.
//
// The product of each score's ds with the function's derivative is added to the element that the score has
// read.
//
// Note [Sums of fixed order]
//     Only the function knows which element a score reads, and many scores may read the same one. Atomic
//     additions would have another order in each run, and sums of integers would need a scale that is not
//     known. Therefore a block adds to sums of its own (core/captured_parts.h), and within a tile one thread
//     adds to each element. The threads write a list of the elements that the scores of some keys read, and
//     of what they add. Then each thread goes through the whole list, from the first key to the last, and
//     adds the entries of its own elements. The upper bits of a product choose an element's thread, so that
//     neighbours and elements at equal distances have different threads.
#pragma once

#include "../../core/captured_parts.h"
#include "../function/captured_sums.h"
#include "../function/launch_with_function.cuh"
#include "gradient_tile.cuh"

namespace selfattn::cuda::simt {

// The list holds the scores of so many keys. It takes the place of a panel of columns.
constexpr int kListKeys = 16;

// The list: place and gradient of each entry. The place is the element's index among all sums, scrambled.
template <class T>
struct CapturedList {
  static constexpr int kCount = kListKeys * kRows<T>;
  static_assert(kCount * (sizeof(T) + sizeof(uint32_t)) <= kColumnPanel<T> * sizeof(T), "it fits");
  static_assert(kThreads == 1 << 7, "the owner is seven bits");

  T* gradients;
  uint32_t* places;

  __device__ __forceinline__ explicit CapturedList(T* panel)
      : gradients(panel), places(reinterpret_cast<uint32_t*>(panel + kCount)) {}

  // The factor is odd, so that it has an inverse modulo 2^32 and nothing is lost.
  static __device__ __forceinline__ uint32_t scrambled(uint32_t place) { return place * 0x9e3779b1u; }
  static __device__ __forceinline__ uint32_t unscrambled(uint32_t place) { return place * 0x0e8b2f51u; }
  static __device__ __forceinline__ int owner(uint32_t scrambled) {
    return static_cast<int>(scrambled >> (32 - 7));
  }

  // Adds the entries of this thread's elements. Neighbouring entries of one element, as for a table of heads
  // or keys, are summed in a register before memory is written.
  __device__ __forceinline__ void add_own(double* sums) const {
    uint32_t place = CapturedSums::kNowhere;
    double sum = 0.0;
    const auto write = [&] {
      if (place != CapturedSums::kNowhere) sums[place] += sum;
    };
#pragma unroll 4
    for (int n = 0; n < kCount; ++n) {
      const uint32_t stored = places[n];
      if (owner(stored) != static_cast<int>(threadIdx.x)) continue;
      const uint32_t next = unscrambled(stored);
      if (next != place) {
        write();
        place = next;
        sum = 0.0;
      }
      sum += static_cast<double>(gradients[n]);
    }
    write();
  }
};

// Adds the entries of a tile. All threads must call it; none needs to have finished with the tile.
template <DType kDType>
__device__ __forceinline__ void add_captured(const AttentionParams& p, const CapturedSums& captured,
                                             const GradientShared<kDType, Side::kCaptured>& shared,
                                             double* sums) {
#if defined(SELFATTN_FUNCTION)
  using T = typename Element<kDType>::Accumulation;
  using Plan = GradientPlan<kDType, Side::kCaptured>;
  const Plan& plan = *shared.plan;
  const CapturedList<T> list(shared.columns);
  ScoreTile<T> tile(p, plan.sequence, plan.head, plan.first_query);
  tile.move_to(plan.first_key);
#pragma unroll 1
  for (int first_key = 0; first_key < Plan::kKeys; first_key += kListKeys) {
#pragma unroll 1
    for (int load = 0; load < score_function::captured_loads; ++load) {
      __syncthreads();  // all threads have finished with the previous list, and with writing ds
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x); n < list.kCount; n += kThreads) {
        const int query = n % kRows<T>, key = first_key + n / kRows<T>;
        const int at = panel_index<T, kRows<T>>(key, query);
        const T grad = shared.score_grads[at];
        T gradient = T(0);
        uint32_t place = CapturedSums::kNowhere;
        if (grad != T(0)) {  // it is 0 for a hidden score
          const auto part = tile.captured_part(load, query, key, shared.weights[at], grad);
          place = captured.place(part.tensor, part.place);
          gradient = part.gradient;
        }
        list.gradients[n] = gradient;
        list.places[n] = list.scrambled(place);
      }
      __syncthreads();
      list.add_own(sums);
    }
  }
#else
  (void)p, (void)captured, (void)shared, (void)sums;
#endif
}

template <DType kDType>
__device__ __forceinline__ GradientPlan<kDType, Side::kCaptured> plan_of_captured(
    const AttentionParams& p, const BackwardArguments& a, const CapturedParts::Item& item) {
  using Plan = GradientPlan<kDType, Side::kCaptured>;
  const int64_t end = smaller(item.strips.end * Plan::kQueries, p.queries);
  Plan plan(p, a, {item.batches.first, item.batches.end}, {item.heads.first, item.heads.end},
            {item.strips.first * Plan::kQueries, end}, {0, p.keys});
  while (!plan.done() && !plan.in_window(p)) plan.step(p, a);
  return plan;
}

// Without a function it does nothing; its name is needed to compile it with one.
template <DType kDType>
__global__ void __launch_bounds__(kThreads, 2)
    captured_gradient_kernel(const AttentionParams p, const BackwardArguments a,
                             const rows::RowGradients<typename Element<kDType>::Accumulation> rows,
                             const CapturedParts parts, const CapturedSums captured,
                             const int64_t first_block) {
  using T = typename Element<kDType>::Accumulation;
  if constexpr (FunctionTile<T>::kAny) {
    SELFATTN_DYNAMIC_SHARED(memory);
    const GradientShared<kDType, Side::kCaptured> shared(memory);
    GradientPlan<kDType, Side::kCaptured>& plan = *shared.plan;
    const CapturedParts::Item item = parts.item(first_block + blockIdx.x);
    if (threadIdx.x == 0) plan = plan_of_captured<kDType>(p, a, item);
    __syncthreads();
    for (; !plan.done(); move_on(plan, p, a)) {
      if (!gradient_tile<kDType, Side::kCaptured>(p, a, rows, shared, true, true)) continue;
      add_captured<kDType>(p, captured, shared, captured.copy(item.copy));
    }
  }
}

// The number of blocks is about this, which is several for each multiprocessor of any device.
constexpr int64_t kCapturedBlocks = 1024;

template <DType kDType>
CapturedParts parts_of_captured(const AttentionParams& p, const CapturedGradients& g) {
  constexpr int kQueries = GradientPlan<kDType, Side::kCaptured>::kQueries;
  return {g, kCapturedBlocks, p.batch, p.heads, divide_up(p.queries, kQueries)};
}

template <DType kDType>
size_t captured_workspace(const AttentionParams& p, const CapturedGradients& g) {
  const int64_t others = parts_of_captured<kDType>(p, g).copies - 1;
  return rows::row_gradients_bytes(p) + static_cast<size_t>(others * g.size()) * sizeof(double);
}

// `where.workspace` begins with the row gradients; the copies follow.
template <DType kDType>
void captured_gradients(const AttentionParams& p, const BackwardArguments& a, const CapturedGradients& g,
                        const Launch& where) {
  using T = typename Element<kDType>::Accumulation;
  const CapturedParts parts = parts_of_captured<kDType>(p, g);
  const CapturedSums sums(g, parts.copies,
                          static_cast<char*>(where.workspace) + rows::row_gradients_bytes(p));
  clear_copies(sums, where);
  launch_blocks_with_function(p.function, &captured_gradient_kernel<kDType>, parts.items(), kThreads,
                              GradientShared<kDType, Side::kCaptured>::kBytes, where, p, a,
                              rows::row_gradients_in<T>(where.workspace, p), parts, sums);
  join_copies(sums, where);
}

}  // namespace selfattn::cuda::simt
