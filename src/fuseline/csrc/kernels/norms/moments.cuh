// Mean and variance of a row about its mean, never as a difference of squares: each warp sums its elements, then their
// squared distances from its own mean; the warps' moments are combined (Chan, Golub, LeVeque 1979). The second pass
// also sums the distances themselves, which takes out what rounding left in the mean. An RMS norm has distances from 0.
#pragma once

#include "device/group.cuh"

namespace fuseline {

// Mean of `count` elements, and the sum of their squared distances from it.
struct Moments {
  float mean, squares, count, unused;
};

// Takes out what rounding left in the mean: `distances` is the sum of (x - mean).
__device__ __forceinline__ Moments corrected(float mean, float distances, float squares, float count) {
  const float left = count > 0.f ? distances / count : 0.f;
  const float about_mean = squares - left * distances;
  return {mean + left, about_mean < 0.f ? 0.f : about_mean, count, 0.f};  // not fmaxf: NaN stays
}

// Moments of the row of n elements from those of its warps; every lane of the warp has the answer.
__device__ __forceinline__ Moments combine(const Moments* states, int count, float n, bool centred) {
  const int lane = int(threadIdx.x) % kWarp;
  const auto warp_sum = [](auto value) {
#pragma unroll
    for (int by = kWarp / 2; by > 0; by /= 2) value = plus(value, from_lane(value, by));
    return value;
  };
  float mean = 0.f;
  if (centred) {
    float sum = 0.f;
#pragma unroll 1
    for (int i = lane; i < count; i += kWarp) sum += states[i].count * states[i].mean;
    mean = warp_sum(sum) / n;
  }
  float2 sums = make_float2(0.f, 0.f);  // of distances, and of squares
#pragma unroll 1
  for (int i = lane; i < count; i += kWarp) {
    const float apart = states[i].mean - mean;
    sums.x += states[i].count * apart;
    sums.y += states[i].squares + states[i].count * apart * apart;
  }
  sums = warp_sum(sums);
  return centred ? corrected(mean, sums.x, sums.y, n) : Moments{0.f, sums.y, n, 0.f};
}

}  // namespace fuseline
