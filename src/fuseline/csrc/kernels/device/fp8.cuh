// Numbers in registers as 8-bit floating point with the scale of their row.
#pragma once

#include <cuda_fp8.h>

#include "launch.cuh"

namespace fuseline {

constexpr int kFp8Step = 16;  // elements: a 16-byte vector of the result
constexpr float kLeastScale = 1e-37f;  // a row of zeros divides by no zero, and gradients are far below activations

template <__nv_fp8_interpretation_t kFormat>
constexpr float kMost = kFormat == __NV_E4M3 ? 448.f : 57344.f;

// Magnitudes are in order as the bits of floats are, NaN above all of them: a row that has one gets it as its scale.
__device__ __forceinline__ uint32_t magnitude(float value) { return __float_as_uint(fabsf(value)); }

__device__ __forceinline__ uint32_t most_of(const float (&values)[kFp8Step]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kFp8Step; ++i) most = max(most, magnitude(values[i]));
  return most;
}

// The largest of all threads' numbers. The block meets once; calls in a row alternate in `turn`, 0 or 1.
__device__ __forceinline__ uint32_t most_of_block(uint32_t mine, int turn) {
  __shared__ uint32_t most_of_warps[2][kMostThreads / kWarp];
  mine = __reduce_max_sync(kAllLanes, mine);
  if (threadIdx.x % kWarp == 0) most_of_warps[turn][threadIdx.x / kWarp] = mine;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  return __reduce_max_sync(kAllLanes, lane < int(blockDim.x) / kWarp ? most_of_warps[turn][lane] : 0);
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ float fp8_scale(uint32_t most) {
  const float scale = __fdiv_rn(__uint_as_float(most), kMost<kFormat>);
  return scale < kLeastScale ? kLeastScale : scale;
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ void store_fp8(uint8_t* to, const float (&values)[kFp8Step], float inverse) {
  uint32_t words[kFp8Step / 4];
#pragma unroll
  for (int i = 0; i < kFp8Step / 4; ++i) {
    const auto pair = [&](int first) {
      const float2 two = make_float2(values[first] * inverse, values[first + 1] * inverse);
      return uint32_t(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, kFormat));
    };
    words[i] = pair(4 * i) | pair(4 * i + 2) << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace fuseline
