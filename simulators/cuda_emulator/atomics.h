// Atomic operations on memory, as far as kernels here use them. They are relaxed, so they order nothing.
#pragma once

#include "site.h"

namespace selfattn::emulator {

int atomic_add(int* address, int value, const Site& site);
unsigned long long atomic_add(unsigned long long* address, unsigned long long value, const Site& site);

}  // namespace selfattn::emulator

// Returns the value before the addition.
inline int atomicAdd(int* address, int value,
                     selfattn::emulator::Site site = selfattn::emulator::Site::at("atomicAdd")) {
  return selfattn::emulator::atomic_add(address, value, site);
}
inline unsigned long long atomicAdd(
    unsigned long long* address, unsigned long long value,
    selfattn::emulator::Site site = selfattn::emulator::Site::at("atomicAdd")) {
  return selfattn::emulator::atomic_add(address, value, site);
}
