// Asynchronous copies from global to shared memory (cp.async). The options say when a copy happens, between
// its issue and the wait for it; until then the destination holds NaN.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "site.h"

namespace selfattn::emulator {

class AsyncCopies {
 public:
  // Begins anew for a new thread, which has issued no copies.
  void restart();
  // Begins a copy. Without a `source` it writes zeros.
  void issue(void* destination, const void* source, int bytes, const Site& site);
  void commit();
  // Returns when at most the newest `pending` committed groups are incomplete.
  void wait(int pending);
  // Lets time pass, so that some copies may complete.
  void pass();
  // Is called when the thread has ended.
  void finish();

 private:
  struct Copy {
    void* destination;
    const void* source;
    int bytes;
    int64_t group;
  };
  static void complete(const Copy& copy);
  // Completes the copies for which `test` holds.
  template <class Test>
  void complete_where(const Test& test);

  std::vector<Copy> in_flight_;
  // The group and number, for the race detector, of every copy that the thread has not waited for, whether it
  // is complete or not: a kernel may not rely on completion.
  std::vector<std::pair<int64_t, int64_t>> unwaited_;
  int64_t open_group_ = 0;  // the number of the group that the next commit closes
};

}  // namespace selfattn::emulator
