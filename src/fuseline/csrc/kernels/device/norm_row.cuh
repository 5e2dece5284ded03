// What the norms' forward does to rows of one dtype whose elements a warp, or a part of one, has in registers as fp32.
#pragma once

#include "norm_elements.cuh"
#include "overlap.cuh"

namespace fuseline {

// sum / count, rounded once: `inverse` is 1 / count to fp32. So a row of equal elements has exactly these as its mean.
__device__ __forceinline__ float mean_of(float sum, float count, float inverse) {
  const float mean = sum * inverse;
  return fmaf(fmaf(-mean, count, sum), inverse, mean);
}

template <class T>
__device__ __forceinline__ float rstd_of(float squares, float inverse_n, float eps) {
  const float variance = fmaf(squares, inverse_n, eps);
  return sizeof(T) == 4 ? 1.f / sqrtf(variance) : rsqrtf(variance);
}

// The moments of `count` elements of which each thread of a group has some, zeros where it has none: all of its vectors
// k with whole(k), and of the others the elements i with inside(k, i). `sum` adds up over the group. What rounding left
// in the mean matters beside the precision of fp32 rows only.
template <class T, int kHeld, int kSize, class Whole, class Inside, class Sum>
__device__ __forceinline__ Moments moments_of(const float (&values)[kHeld][kSize], float count, float inverse,
                                              bool centred, Whole&& whole, Inside&& inside, Sum&& sum) {
  float mean = 0.f;
  if (centred) {
    float totals[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) totals[i % 2] += values[k][i];
    }
    mean = mean_of(sum(totals[0] + totals[1]), count, inverse);
  }
  float squares[2] = {0.f, 0.f}, distances = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const auto add = [&](int i) {
      const float apart = values[k][i] - mean;
      squares[i % 2] = fmaf(apart, apart, squares[i % 2]);
      if (sizeof(T) == 4) distances += apart;
    };
    if (whole(k)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) add(i);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (inside(k, i)) add(i);
      }
    }
  }
  if constexpr (sizeof(T) == 4) {
    const float2 sums = sum(make_float2(distances, squares[0] + squares[1]));
    return centred ? corrected(mean, sums.x, sums.y, count) : Moments{0.f, sums.y, count, 0.f};
  } else {
    return {mean, sum(squares[0] + squares[1]), count, 0.f};
  }
}

// Ones, in the place of weights that are not there.
template <class T>
__device__ __forceinline__ uint4 ones() {
  const uint32_t one = sizeof(T) == 4 ? 0x3f800000u : pack_pair<T>(1.f, 1.f);
  return make_uint4(one, one, one, one);
}

}  // namespace fuseline
