// CUDA's functions of a warp or a block. Each takes the place of its call, for reports.
#pragma once

#include <cstring>

#include "site.h"
#include "warp.h"

namespace selfattn::emulator {

struct Shuffle {
  int source;  // the lane whose value this one wants
  uint64_t value;
  uint64_t result;
};

struct Vote {
  bool value;
  uint32_t result;  // the lanes that voted yes
};

void shuffle(const Operands& operands);
void vote(const Operands& operands);
void fence(const Operands& operands);

template <class T>
T shuffle_from(const Site& site, uint32_t mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles move at most 8 bytes");
  Shuffle operands{source, 0, 0};
  std::memcpy(&operands.value, &value, sizeof(T));
  meet(site, mask, &operands, &shuffle);
  T result;
  std::memcpy(&result, &operands.result, sizeof(T));
  return result;
}

inline uint32_t vote_of(const Site& site, uint32_t mask, bool value) {
  Vote operands{value, 0};
  meet(site, mask, &operands, &vote);
  return operands.result;
}

int running_lane();

}  // namespace selfattn::emulator

inline void __syncthreads(selfattn::emulator::Site site = selfattn::emulator::Site::at("__syncthreads")) {
  selfattn::emulator::meet_block(site, false);
}

inline int __syncthreads_or(
    int vote, selfattn::emulator::Site site = selfattn::emulator::Site::at("__syncthreads_or")) {
  return selfattn::emulator::meet_block(site, vote != 0) != 0;
}

inline int __syncthreads_count(
    int vote, selfattn::emulator::Site site = selfattn::emulator::Site::at("__syncthreads_count")) {
  return selfattn::emulator::meet_block(site, vote != 0);
}

inline int __syncthreads_and(
    int vote, selfattn::emulator::Site site = selfattn::emulator::Site::at("__syncthreads_and")) {
  return selfattn::emulator::meet_block(site, vote == 0) == 0;
}

inline void __syncwarp(uint32_t mask = selfattn::emulator::kFullMask,
                       selfattn::emulator::Site site = selfattn::emulator::Site::at("__syncwarp")) {
  bool present = true;  // an operand, by which fence() knows which lanes take part
  selfattn::emulator::meet(site, mask, &present, &selfattn::emulator::fence);
}

// `width` is that of CUDA: lanes exchange values within groups of that many lanes, a power of 2.
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = selfattn::emulator::kWarpSize,
              selfattn::emulator::Site site = selfattn::emulator::Site::at("__shfl_sync")) {
  const int first = selfattn::emulator::running_lane() & ~(width - 1);
  return selfattn::emulator::shuffle_from(site, mask, value, first + (source & (width - 1)));
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = selfattn::emulator::kWarpSize,
                  selfattn::emulator::Site site = selfattn::emulator::Site::at("__shfl_xor_sync")) {
  const int lane = selfattn::emulator::running_lane();
  const int source = lane ^ lane_mask;
  return selfattn::emulator::shuffle_from(site, mask, value, source / width > lane / width ? lane : source);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, int delta, int width = selfattn::emulator::kWarpSize,
                   selfattn::emulator::Site site = selfattn::emulator::Site::at("__shfl_down_sync")) {
  const int lane = selfattn::emulator::running_lane();
  const bool inside = (lane & (width - 1)) + delta < width;
  return selfattn::emulator::shuffle_from(site, mask, value, inside ? lane + delta : lane);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, int delta, int width = selfattn::emulator::kWarpSize,
                 selfattn::emulator::Site site = selfattn::emulator::Site::at("__shfl_up_sync")) {
  const int lane = selfattn::emulator::running_lane();
  const bool inside = (lane & (width - 1)) >= delta;
  return selfattn::emulator::shuffle_from(site, mask, value, inside ? lane - delta : lane);
}

inline uint32_t __ballot_sync(uint32_t mask, int value,
                              selfattn::emulator::Site site = selfattn::emulator::Site::at("__ballot_sync")) {
  return selfattn::emulator::vote_of(site, mask, value != 0);
}

inline int __any_sync(uint32_t mask, int value,
                      selfattn::emulator::Site site = selfattn::emulator::Site::at("__any_sync")) {
  return selfattn::emulator::vote_of(site, mask, value != 0) != 0;
}

inline int __all_sync(uint32_t mask, int value,
                      selfattn::emulator::Site site = selfattn::emulator::Site::at("__all_sync")) {
  return selfattn::emulator::vote_of(site, mask, value != 0) == mask;
}
