#include "copies.h"

#include <cstring>

#include "banks.h"
#include "options.h"
#include "races.h"
#include "shared_memory.h"

namespace selfattn::emulator {

void AsyncCopies::complete(const Copy& copy) {
  if (copy.source == nullptr) {
    std::memset(copy.destination, 0, static_cast<size_t>(copy.bytes));
  } else {
    std::memcpy(copy.destination, copy.source, static_cast<size_t>(copy.bytes));
  }
}

void AsyncCopies::restart() {
  in_flight_.clear();
  unwaited_.clear();
  open_group_ = 0;
}

void AsyncCopies::issue(void* destination, const void* source, int bytes, const Site& site) {
  check_shared(destination, bytes, site);
  banks::record_copy(site, destination);
  unwaited_.emplace_back(open_group_, races::begin_copy(destination, source, bytes, site));
  const Copy copy{destination, source, bytes, open_group_};
  const Copies when = options().copies;
  if (when == Copies::kEager || (when == Copies::kRandom && random_number() % 4 == 0)) return complete(copy);
  std::memset(destination, 0xff, static_cast<size_t>(bytes));
  in_flight_.push_back(copy);
}

void AsyncCopies::commit() { ++open_group_; }

template <class Test>
void AsyncCopies::complete_where(const Test& test) {
  size_t kept = 0;
  for (const Copy& copy : in_flight_) {
    if (test(copy)) {
      complete(copy);
    } else {
      in_flight_[kept++] = copy;
    }
  }
  in_flight_.resize(kept);
}

void AsyncCopies::wait(int pending) {
  // Copies since the last commit belong to no group yet, so no wait completes them.
  complete_where([&](const Copy& copy) { return copy.group < open_group_ - pending; });

  size_t waited = 0;
  while (waited < unwaited_.size() && unwaited_[waited].first < open_group_ - pending) ++waited;
  if (waited == 0) return;
  races::copies_arrived(unwaited_[waited - 1].second);
  unwaited_.erase(unwaited_.begin(), unwaited_.begin() + static_cast<std::ptrdiff_t>(waited));
}

void AsyncCopies::pass() {
  if (in_flight_.empty() || options().copies != Copies::kRandom) return;
  // Any copy may complete next: groups complete in order only for threads that wait.
  complete_where([](const Copy&) { return random_number() % 4 == 0; });
}

void AsyncCopies::finish() {
  complete_where([](const Copy&) { return true; });
}

}  // namespace selfattn::emulator
