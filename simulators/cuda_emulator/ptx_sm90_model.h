// The instructions of csrc/cuda/common/ptx_sm90.cuh as functions. They have the same names and arguments, and
// that file says what they do.
#pragma once

#include <cstdint>

#include "group_products.h"
#include "site.h"
#include "cuda/common/tensor_map.h"

namespace selfattn::emulator {

// Fails if the device has none of these instructions.
void require_hopper(const Site& site);

void barrier_init(uint64_t* barrier, int arrivals, const Site& site);
void barrier_init_fence(const Site& site);
void barrier_arrive(uint64_t* barrier, const Site& site);
void barrier_arrive_expecting(uint64_t* barrier, int bytes, const Site& site);
void barrier_wait(uint64_t* barrier, uint32_t parity, const Site& site);
void copy_box_async(void* shared, const void* map, uint64_t* barrier, int column, int row, int second,
                    int third, const Site& site);
void fence_async_proxy(const Site& site);
void come_to_barrier(int number, int threads, bool waits, const Site& site);
void set_registers(int count, bool takes, const Site& site);

template <int kColumns>
constexpr bool kProductColumns = kColumns == 32 || kColumns == 64 || kColumns == 96 || kColumns == 128 ||
                                 kColumns == 192 || kColumns == 256;

}  // namespace selfattn::emulator

namespace selfattn::cuda::ptx {

using emulator::Site;

inline void barrier_init(uint64_t* barrier, int arrivals, Site site = Site::at("barrier_init")) {
  emulator::barrier_init(barrier, arrivals, site);
}

inline void barrier_init_fence(Site site = Site::at("barrier_init_fence")) {
  emulator::barrier_init_fence(site);
}

inline void barrier_arrive(uint64_t* barrier, Site site = Site::at("barrier_arrive")) {
  emulator::barrier_arrive(barrier, site);
}

inline void barrier_arrive_expecting(uint64_t* barrier, int bytes,
                                     Site site = Site::at("barrier_arrive_expecting")) {
  emulator::barrier_arrive_expecting(barrier, bytes, site);
}

inline void barrier_wait(uint64_t* barrier, uint32_t parity, Site site = Site::at("barrier_wait")) {
  emulator::barrier_wait(barrier, parity, site);
}

inline void copy_box_async(void* shared, const TensorMap* map, uint64_t* barrier, int column, int row,
                           int second, int third, Site site = Site::at("copy_box_async")) {
  emulator::copy_box_async(shared, map, barrier, column, row, second, third, site);
}

inline void fence_async_proxy(Site site = Site::at("fence_async_proxy")) {
  emulator::fence_async_proxy(site);
}

inline void sync_threads(int number, int threads, Site site = Site::at("sync_threads")) {
  emulator::come_to_barrier(number, threads, true, site);
}

inline void arrive_threads(int number, int threads, Site site = Site::at("arrive_threads")) {
  emulator::come_to_barrier(number, threads, false, site);
}

template <int kRegisters>
void give_up_registers(Site site = Site::at("give_up_registers")) {
  emulator::set_registers(kRegisters, false, site);
}

template <int kRegisters>
void take_registers(Site site = Site::at("take_registers")) {
  emulator::set_registers(kRegisters, true, site);
}

inline uint64_t matrix_by_columns(const void* panels, int panel_rows, int row, int column,
                                  Site site = Site::at("matrix_by_columns")) {
  return emulator::products::matrix(panels, panel_rows, row, column, false, site);
}

inline uint64_t matrix_by_rows(const void* panels, int panel_rows, int row, int column,
                               Site site = Site::at("matrix_by_rows")) {
  return emulator::products::matrix(panels, panel_rows, row, column, true, site);
}

inline void products_fence(Site site = Site::at("products_fence")) { emulator::products::fence(site); }

inline void products_commit(Site site = Site::at("products_commit")) { emulator::products::commit(site); }

template <int Pending>
void products_wait(Site site = Site::at("products_wait")) {
  emulator::products::wait(Pending, site);
}

template <int kTiles>
void products_touch(float (&)[kTiles][4]) {}
inline void products_touch(uint32_t (&)[4]) {}

template <bool kBFloat16, int kColumns, bool kLeftTurned, bool kRightTurned>
void product_async(float (&d)[kColumns / 8][4], uint64_t a_matrix, uint64_t b_matrix, bool adds,
                   Site site = Site::at("product_async")) {
  static_assert(emulator::kProductColumns<kColumns>, "there is no product of so many columns");
  emulator::products::multiply({kBFloat16, kColumns, kLeftTurned, kRightTurned}, d[0], nullptr, a_matrix,
                               b_matrix, adds, site);
}
template <bool kBFloat16, int kColumns, bool kRightTurned>
void product_async(float (&d)[kColumns / 8][4], const uint32_t (&a)[4], uint64_t b_matrix, bool adds,
                   Site site = Site::at("product_async")) {
  static_assert(emulator::kProductColumns<kColumns>, "there is no product of so many columns");
  emulator::products::multiply({kBFloat16, kColumns, false, kRightTurned}, d[0], a, 0, b_matrix, adds, site);
}

}  // namespace selfattn::cuda::ptx
