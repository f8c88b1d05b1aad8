// Counter-based random numbers for dropout: Philox4x32 with 7 rounds. The paper is Salmon, Moraes, Dror,
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; 7 rounds pass BigCrush there. A number
// depends on the seed and on the position of its weight only, so every kernel, tiling, thread count and
// device drops the same weights.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace selfattn {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;

struct Philox4 {
  uint32_t word[4];
};

// Returns the four words for keys 4*key_group .. 4*key_group + 3 of one query row.
inline SELFATTN_HOST_DEVICE Philox4 philox(uint64_t seed, uint32_t key_group, uint32_t query, uint32_t head,
                                           uint32_t batch) {
  uint32_t c0 = key_group, c1 = query, c2 = head, c3 = batch;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMultiplier0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c2;
    const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = next0;
    c2 = next2;
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Returns the threshold of dropout: a weight is dropped if its word is below it. It is 2^32 for probability
// 1, hence 64 bits.
inline SELFATTN_HOST_DEVICE uint64_t dropout_threshold(double probability) {
  return static_cast<uint64_t>(probability * 4294967296.0);
}

// Returns the factor of the weights that are kept. None is kept at probability 1, where 1/(1-p) would be
// infinite.
inline SELFATTN_HOST_DEVICE double dropout_keep_scale(double probability) {
  return probability < 1.0 ? 1.0 / (1.0 - probability) : 0.0;
}

}  // namespace selfattn
