// A warpgroup that brings tiles and two that multiply them, with all of Hopper's instructions. It prints how
// many numbers differ from those of plain loops on the host.
#include "hopper_host.h"

namespace hopper {

namespace {

constexpr int kTiles = 7, kStages = 2, kTileBytes = 64 * 128;

// Two warpgroups sum up the products of their own tiles of the left tensor and common ones of the right
// tensor, which a third warpgroup brings. They take turns, as attention's do for their softmax.
__global__ void __launch_bounds__(384) sum_products(const __grid_constant__ Maps maps, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int n = 0; n < kStages; ++n) {
      ptx::barrier_init(&full[n], 1);
      ptx::barrier_init(&empty[n], 2 * 4);  // an arrival by each warp
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    ptx::give_up_registers<24>();
    if (threadIdx.x == 0) {
      for (int tile = 0; tile < kTiles; ++tile) {
        const int stage = tile % kStages;
        unsigned char* const to = memory + stage * 3 * kTileBytes;
        // The phase before the first one counts as ended.
        ptx::barrier_wait(&empty[stage], static_cast<uint32_t>((tile / kStages + 1) & 1));
        ptx::barrier_arrive_expecting(&full[stage], 3 * kTileBytes);
        ptx::copy_box_async(to, &maps.left, &full[stage], 0, tile * 64, 0, 0);
        ptx::copy_box_async(to + kTileBytes, &maps.left, &full[stage], 0, tile * 64, 1, 0);
        ptx::copy_box_async(to + 2 * kTileBytes, &maps.right, &full[stage], 0, tile * 64, 0, 0);
      }
    }
    return;
  }
  ptx::take_registers<240>();
  const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  float d[8][4];
  for (int tile = 0; tile < 8; ++tile) {
    for (int n = 0; n < 4; ++n) d[tile][n] = 0.0f;
  }
  if (group == 2) ptx::arrive_threads(1, 256);  // the first turn is the other's
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    unsigned char* const from = memory + stage * 3 * kTileBytes;
    ptx::barrier_wait(&full[stage], static_cast<uint32_t>(tile / kStages & 1));
    ptx::sync_threads(group, 256);
    ptx::products_touch(d);
    ptx::products_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::product_async<true, 64, false, true>(
          d, ptx::matrix_by_columns(from + (group - 1) * kTileBytes, 64, 0, step * 16),
          ptx::matrix_by_rows(from + 2 * kTileBytes, 64, step * 16, 0), true);
    }
    ptx::products_commit();
    if (group == 1 || tile + 1 < kTiles) ptx::arrive_threads(3 - group, 256);
    ptx::products_wait<0>();
    ptx::products_touch(d);
    if (lane == 0) ptx::barrier_arrive(&empty[stage]);
  }
  for (int tile = 0; tile < 8; ++tile) {
    for (int n = 0; n < 4; ++n) {
      const int row = warp * 16 + lane / 4 + n / 2 * 8, column = tile * 8 + lane % 4 * 2 + n % 2;
      out[((group - 1) * 64 + row) * 64 + column] = d[tile][n];
    }
  }
}

void pipeline() {
  constexpr int kLength = kTiles * 64;
  Tensor left = matrix(2 * kLength, 64, true, 3), right = matrix(kLength, 64, true, 70001);
  left.sizes[1] = kLength;
  left.sizes[2] = 2;
  left.strides[2] = kLength * 64;
  const Maps maps{map_of(left, 64, true), map_of(right, 64, true)};
  float* const out = allocate<float>(2 * 64 * 64);
  const int bytes = kStages * 3 * kTileBytes;
  check(cudaFuncSetAttribute(sum_products, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  sum_products<<<1, 384, bytes>>>(maps, out);
  check(cudaGetLastError());
  const std::vector<float> found = to_host(out, 2 * 64 * 64);
  int wrong = 0;
  for (int group = 0; group < 2; ++group) {
    for (int row = 0; row < 64; ++row) {
      for (int column = 0; column < 64; ++column) {
        int sum = 0;
        for (int tile = 0; tile < kTiles; ++tile) {
          for (int k = 0; k < 64; ++k) {
            sum += number(((group * kTiles + tile) * 64 + row) * 64 + k, 3) *
                   number((tile * 64 + k) * 64 + column, 70001);
          }
        }
        wrong +=
            found[static_cast<size_t>((group * 64 + row) * 64 + column)] == static_cast<float>(sum) ? 0 : 1;
      }
    }
  }
  std::printf("pipeline: %d\n", wrong);
}

}  // namespace

}  // namespace hopper

int main() { hopper::pipeline(); }
