#include "atomics.h"

#include "races.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator {

namespace {

// The race detector's compiler does not instrument this file, so an atomic operation is one access, not two.
template <class T>
T add(T* address, T value, const Site& site) {
  if (shared_memory().is_near(address)) check_shared(address, sizeof(*address), site);
  races::update(address, sizeof(*address), site);
  const T before = *address;
  *address = static_cast<T>(static_cast<unsigned long long>(before) + static_cast<unsigned long long>(value));
  return before;
}

}  // namespace

int atomic_add(int* address, int value, const Site& site) { return add(address, value, site); }
unsigned long long atomic_add(unsigned long long* address, unsigned long long value, const Site& site) {
  return add(address, value, site);
}

}  // namespace selfattn::emulator
