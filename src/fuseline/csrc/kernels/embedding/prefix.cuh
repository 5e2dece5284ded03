// Sums over the threads of a block that come before each.
#pragma once

#include "device/group.cuh"

namespace fuseline {

// The sum of the values of the threads before this, and of all, in a block of kWarps warps. `of_warp` is free again after
// the next barrier.
template <int kWarps>
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t (&of_warp)[kWarps], uint32_t& all) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();
  all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) {
    if (w == warp) sum += all;
    all += of_warp[w];
  }
  return sum - value;
}

}  // namespace fuseline
