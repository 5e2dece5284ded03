// How the norms' forward takes a row's moments from those of its few warps.
#pragma once

#include "norm_row.cuh"

namespace fuseline {

// As combine_near, of kMost warps at most, a power of two, and with no branches.
template <int kMost>
__device__ __forceinline__ Moments combine_few(const Moments* states, int count, float n, float inverse_n, bool centred) {
  const int lane = int(threadIdx.x) % kMost;
  const float near = centred ? states[0].mean : 0.f;
  float2 sums = make_float2(0.f, 0.f);
  if (lane < count) {
    const Moments state = states[lane];
    const float apart = state.mean - near, distance = state.count * apart;
    sums = make_float2(distance, fmaf(distance, apart, state.squares));
  }
#pragma unroll
  for (int by = kMost / 2; by > 0; by /= 2) sums = plus(sums, from_lane(sums, by));
  return centred ? about_mean(near, sums, n, inverse_n) : Moments{0.f, sums.y, n, 0.f};
}

}  // namespace fuseline
