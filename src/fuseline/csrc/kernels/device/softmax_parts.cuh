// Softmax taken in parts: what a warp adds up, and what a part weighs in the whole.
#pragma once

#include "vector.cuh"

namespace fuseline {

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

__device__ __forceinline__ float most_of_warp(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// 2^(x - most), and 0 where nothing was seen.
__device__ __forceinline__ float weight_of(float x, float most) { return x == -kInfinity ? 0.f : exp2f(x - most); }

}  // namespace fuseline
