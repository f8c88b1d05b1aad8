// The visible range of a query, and of a run of queries, against a definition key by key.
#include "core/visible_range.h"

#include "check.h"

using namespace selfattn;

namespace {

bool sees(const AttentionParams& p, int64_t query, int64_t key) {
  const int64_t position = query + p.query_offset;
  if (p.window_left >= 0 && key < position - p.window_left) return false;
  if (p.window_right >= 0 && key > position + p.window_right) return false;
  return true;
}

std::string describe(const AttentionParams& p, int64_t query) {
  return "keys " + std::to_string(p.keys) + " left " + std::to_string(p.window_left) + " right " +
         std::to_string(p.window_right) + " offset " + std::to_string(p.query_offset) + " query " +
         std::to_string(query);
}

}  // namespace

TEST(one_query_sees_what_the_definition_says) {
  AttentionParams p;
  for (p.keys = 0; p.keys <= 5; ++p.keys) {
    for (p.window_left = -1; p.window_left <= 4; ++p.window_left) {
      for (p.window_right = -1; p.window_right <= 4; ++p.window_right) {
        for (p.query_offset = -8; p.query_offset <= 8; ++p.query_offset) {
          for (int64_t query = 0; query < 5; ++query) {
            const KeyRange range = visible_keys(p, query, query);
            CHECK_FOR(range.begin >= 0 && range.end <= p.keys, describe(p, query));
            for (int64_t key = 0; key < p.keys; ++key) {
              const bool inside = key >= range.begin && key < range.end;
              CHECK_FOR(inside == sees(p, query, key), describe(p, query));
            }
          }
        }
      }
    }
  }
}

TEST(a_run_of_queries_covers_each_of_them) {
  AttentionParams p;
  p.keys = 6;
  for (p.window_left = -1; p.window_left <= 3; ++p.window_left) {
    for (p.window_right = -1; p.window_right <= 3; ++p.window_right) {
      for (p.query_offset = -9; p.query_offset <= 9; ++p.query_offset) {
        const KeyRange run = visible_keys(p, 1, 4);
        for (int64_t query = 1; query <= 4; ++query) {
          for (int64_t key = 0; key < p.keys; ++key) {
            if (sees(p, query, key)) CHECK_FOR(key >= run.begin && key < run.end, describe(p, query));
          }
        }
      }
    }
  }
}

TEST(the_largest_offsets_and_windows_do_not_overflow) {
  AttentionParams p;
  p.keys = 100;
  const int64_t far = int64_t{1} << 42;
  p.window_left = far;
  p.window_right = far;
  p.query_offset = int64_t{1} << 40;
  KeyRange range = visible_keys(p, 0, int64_t{1} << 40);
  CHECK(range.begin == 0 && range.end == 100);
  p.window_left = 0;
  range = visible_keys(p, 0, 0);
  CHECK(range.begin >= range.end);  // all keys come before the window
  p.query_offset = -p.query_offset;
  p.window_right = 0;
  range = visible_keys(p, 0, 0);
  CHECK(range.begin >= range.end);
}
