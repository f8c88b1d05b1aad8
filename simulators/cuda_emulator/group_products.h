// Products of a warpgroup (wgmma): asynchronous, of 128 threads together. When one happens between its issue
// and the wait for its group is up to the options for copies; until then its results are NaN.
#pragma once

#include <cstdint>
#include <string>

#include "site.h"

namespace selfattn::emulator::products {

constexpr int kGroupThreads = 128;

void start_block();
// The running thread has ended: reports products that it has not waited for.
void end_thread();

// The warpgroup of the running thread; fails where it is not complete.
int group_of_self(const Site& site);

// Where a matrix lies in shared memory, in the word that kernels carry to products.
uint64_t matrix(const void* panels, int panel_rows, int row, int column, bool by_rows, const Site& site);

struct Form {
  bool bfloat16;
  int columns;
  bool left_turned;
  bool right_turned;
};

// `a`: the left operand's four registers, or null where it is `a_matrix`.
void multiply(const Form& form, float* d, const uint32_t* a, uint64_t a_matrix, uint64_t b_matrix, bool adds,
              const Site& site);
void fence(const Site& site);
void commit(const Site& site);
void wait(int pending, const Site& site);

// One line for each warpgroup some of whose threads have come to a step and others not.
std::string what_groups_lack();

// Time passes: a product may happen.
void pass();

}  // namespace selfattn::emulator::products
