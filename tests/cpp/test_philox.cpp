// Philox against the published vectors, and how dropout uses it.
#include "core/philox.h"

#include <cmath>
#include <set>

#include "check.h"

using namespace selfattn;

// These are kat_vectors of Random123 (Salmon et al., SC 2011): "philox4x32 7", counter, key, result.
TEST(known_answers) {
  struct Vector {
    uint32_t counter[4];
    uint32_t key[2];
    uint32_t result[4];
  };
  const Vector vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const Vector& v : vectors) {
    const uint64_t seed = v.key[0] | static_cast<uint64_t>(v.key[1]) << 32;
    const Philox4 words = philox(seed, v.counter[0], v.counter[1], v.counter[2], v.counter[3]);
    for (int n = 0; n < 4; ++n) CHECK(words.word[n] == v.result[n]);
  }
}

TEST(every_argument_matters) {
  std::set<uint32_t> seen;
  seen.insert(philox(1, 2, 3, 4, 5).word[0]);
  seen.insert(philox(2, 2, 3, 4, 5).word[0]);
  seen.insert(philox(1 + (uint64_t{1} << 32), 2, 3, 4, 5).word[0]);
  seen.insert(philox(1, 3, 3, 4, 5).word[0]);
  seen.insert(philox(1, 2, 4, 4, 5).word[0]);
  seen.insert(philox(1, 2, 3, 5, 5).word[0]);
  seen.insert(philox(1, 2, 3, 4, 6).word[0]);
  CHECK(seen.size() == 7);
}

TEST(thresholds_cover_the_unit_interval) {
  CHECK(dropout_threshold(0.0) == 0);
  CHECK(dropout_threshold(0.5) == uint64_t{1} << 31);
  CHECK(dropout_threshold(1.0) == uint64_t{1} << 32);  // above every word, so that all are dropped
  CHECK(dropout_keep_scale(0.0) == 1.0);
  CHECK(dropout_keep_scale(0.75) == 4.0);
  CHECK(dropout_keep_scale(1.0) == 0.0);
}

TEST(the_dropped_share_is_the_probability) {
  constexpr int kWords = 400000;
  for (const double p : {0.1, 0.5, 0.9}) {
    int64_t dropped = 0;
    for (uint32_t n = 0; n < kWords / 4; ++n) {
      const Philox4 words = philox(99, n, n / 7, 3, 1);
      for (const uint32_t word : words.word) dropped += word < dropout_threshold(p);
    }
    const double deviation = std::sqrt(p * (1 - p) / kWords);
    CHECK_FOR(std::fabs(static_cast<double>(dropped) / kWords - p) < 5 * deviation, std::to_string(p));
  }
}
