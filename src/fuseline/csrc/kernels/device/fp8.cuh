// Numbers in registers as 8-bit floating point with the scale of their row.
#pragma once

#include <cuda_fp8.h>

#include "launch.cuh"

namespace fuseline {

constexpr int kFp8Vector = 8;  // elements: a 16-byte vector of 16 bits each, 8 bytes of the result
constexpr int kFp8Multiple = 16;  // of the sizes of a scaled matrix product
constexpr float kLeastScale = 1e-37f;  // a row of zeros divides by no zero, and gradients are far below activations

// The larger of `most` and |value|; NaN if one of them is: a row that has one gets it as its scale.
__device__ __forceinline__ float larger(float most, float value) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(value)));
  return most;
}

// The largest of the magnitudes of all threads that share a row. blockDim.x threads do, whole warps, and blockDim.y rows
// stand beside each other. Calls in a row alternate in `turn`, 0 or 1.
__device__ __forceinline__ float largest_of_row(float mine, int turn) {
  __shared__ uint32_t of_warps[2][kMostThreads / kWarp];
  // Magnitudes are in order as their bits are, NaN above all of them.
  uint32_t most = __reduce_max_sync(kAllLanes, __float_as_uint(mine));
  if (blockDim.x == kWarp) return __uint_as_float(most);
  const int warps = int(blockDim.x) / kWarp, lane = threadIdx.x % kWarp, first = int(threadIdx.y) * warps;
  if (lane == 0) of_warps[turn][first + threadIdx.x / kWarp] = most;
  __syncthreads();
  most = __reduce_max_sync(kAllLanes, lane < warps ? of_warps[turn][first + lane] : 0);
  return __uint_as_float(most);
}

__device__ __forceinline__ float fp8_scale(float most, bool e5m2) {
  const float scale = __fdiv_rn(most, e5m2 ? 57344.f : 448.f);
  return scale < kLeastScale ? kLeastScale : scale;
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint2 fp8_vector(const float (&values)[kFp8Vector], float inverse) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto pair = [&](int first) {
      const float2 two = make_float2(values[first] * inverse, values[first + 1] * inverse);
      return uint32_t(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, kFormat));
    };
    words[i] = pair(4 * i) | pair(4 * i + 2) << 16;
  }
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void store_fp8(uint8_t* to, const float (&values)[kFp8Vector], float inverse, bool e5m2) {
  // The branch on the format is the same for all threads: cheaper than a kernel for each.
  *reinterpret_cast<uint2*>(to) =
      e5m2 ? fp8_vector<__NV_E5M2>(values, inverse) : fp8_vector<__NV_E4M3>(values, inverse);
}

}  // namespace fuseline
