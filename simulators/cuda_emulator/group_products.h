// Products of a warpgroup (wgmma): asynchronous, of 128 threads together. The options for copies say when a
// product happens, between its issue and the wait for its group; until then its results are NaN.
#pragma once

#include <cstdint>
#include <string>

#include "site.h"

namespace selfattn::emulator::products {

constexpr int kGroupThreads = 128;

void start_block();
// Is called when the running thread has ended. Reports products that it has not waited for.
void end_thread();

// Returns the warpgroup of the running thread; fails if the warpgroup is not complete.
int group_of_self(const Site& site);

// Returns the word that kernels pass to products for a matrix in shared memory: it says where the matrix
// lies.
uint64_t matrix(const void* panels, int panel_rows, int row, int column, bool by_rows, const Site& site);

struct Form {
  bool bfloat16;
  int columns;
  bool left_turned;
  bool right_turned;
};

// `a` holds the left operand's four registers; it is null if the left operand is `a_matrix`.
void multiply(const Form& form, float* d, const uint32_t* a, uint64_t a_matrix, uint64_t b_matrix, bool adds,
              const Site& site);
void fence(const Site& site);
void commit(const Site& site);
void wait(int pending, const Site& site);

// Returns a line for each warpgroup of which some threads have come to a step and others have not.
std::string what_groups_lack();

// Lets time pass, so that a product may happen.
void pass();

}  // namespace selfattn::emulator::products
