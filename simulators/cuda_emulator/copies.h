// Asynchronous copies from global to shared memory (cp.async). When they happen between their issue and the
// wait for them is up to the options; until then the destination holds NaN.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "site.h"

namespace selfattn::emulator {

class AsyncCopies {
 public:
  // A new thread, which has issued none.
  void restart();
  // `source` null: zeros.
  void issue(void* destination, const void* source, int bytes, const Site& site);
  void commit();
  // Until at most the newest `pending` committed groups are incomplete.
  void wait(int pending);
  // Time passes: some copies may complete.
  void pass();
  // The thread has ended.
  void finish();

 private:
  struct Copy {
    void* destination;
    const void* source;
    int bytes;
    int64_t group;
  };
  static void complete(const Copy& copy);
  // Those for which `test` holds.
  template <class Test>
  void complete_where(const Test& test);

  std::vector<Copy> in_flight_;
  // Group and number, for the race detector, of every copy that has not been waited for, complete or not: a
  // kernel may not rely on that.
  std::vector<std::pair<int64_t, int64_t>> unwaited_;
  int64_t open_group_ = 0;  // the number of the group that the next commit closes
};

}  // namespace selfattn::emulator
