#include "atomics.h"

#include "races.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace selfattn::emulator {

int atomic_add(int* address, int value, const Site& site) {
  // In a file that the race detector's compiler does not instrument: this is one access, not two.
  if (shared_memory().is_near(address)) check_shared(address, sizeof(*address), site);
  races::update(address, sizeof(*address), site);
  const int before = *address;
  *address = static_cast<int>(static_cast<unsigned>(before) + static_cast<unsigned>(value));
  return before;
}

}  // namespace selfattn::emulator
