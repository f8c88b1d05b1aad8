// Which weights of a tile dropout keeps, as bits.
#pragma once

#include "../common/dropout.cuh"
#include "place.cuh"

namespace selfattn::cuda::mma {

// The bits of one strip. A call of Philox serves four neighbouring keys of a query. Where keys are columns,
// two neighbouring lanes own these four, in two rows each: the even lane makes the numbers of the upper row,
// the odd lane those of the lower, and they exchange them. Where keys are rows, four lanes own them, in two
// columns and two halves of the strip each: every lane makes the numbers of one of these four.
template <class Place>
class StripDropout {
 public:
  __device__ __forceinline__ StripDropout(const Place& at, int strip)
      : at_(at),
        strip_(strip),
        share_(Place::kColumnsAreKeys ? at.lane.lane & 1 : at.lane.group & 3),
        pattern_(at.params().dropout, at.batch(), mine(0).head) {}

  // Bit 2 * half + i: whether the element is kept. Collective.
  __device__ __forceinline__ uint32_t kept(int tile) const {
    const Philox4 words = pattern_.words(mine(tile).query, at_.key(strip_, half_of_keys(), tile, 0));
    uint32_t of_keys = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) of_keys |= static_cast<uint32_t>(pattern_.factor(words, i) != 0.0f) << i;
    uint32_t all = of_keys << 4 * share_;
    if constexpr (Place::kColumnsAreKeys) {
      all |= __shfl_xor_sync(kWholeWarp, all, 1);
      all >>= at_.lane.quad & 1 ? 2 : 0;
      return (all & 3u) | (all >> 2 & 12u);
    } else {
      all |= __shfl_xor_sync(kWholeWarp, all, 4);
      all |= __shfl_xor_sync(kWholeWarp, all, 8);
      all >>= at_.lane.group & 3;
      return (all & 1u) | (all >> 3 & 2u) | (all >> 6 & 4u) | (all >> 9 & 8u);
    }
  }

 private:
  // The query whose numbers this lane makes.
  __device__ __forceinline__ RowOf mine(int tile) const {
    return Place::kColumnsAreKeys ? at_.query(strip_, share_, tile, 0)
                                  : at_.query(strip_, share_ >> 1, tile, share_ & 1);
  }
  __device__ __forceinline__ int half_of_keys() const { return Place::kColumnsAreKeys ? 0 : share_ >> 1; }

  const Place at_;
  const int strip_, share_;  // which of the lanes that exchange numbers this one is
  const DropoutPattern<float> pattern_;
};

}  // namespace selfattn::cuda::mma
