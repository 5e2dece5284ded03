// What the norms' forward does to rows of one dtype whose elements a warp, or a part of one, has in registers as fp32.
#pragma once

#include "norm_elements.cuh"
#include "device/overlap.cuh"

namespace fuseline {

// sum / count, rounded once: `inverse` is 1 / count to fp32. So a row of equal elements has exactly these as its mean.
__device__ __forceinline__ float mean_of(float sum, float count, float inverse) {
  const float mean = sum * inverse;
  return fmaf(fmaf(-mean, count, sum), inverse, mean);
}

// The moments of `count` elements from the sums of their distances from `near` and of the squares of these.
__device__ __forceinline__ Moments about_mean(float near, float2 sums, float count, float inverse) {
  const float off = sums.x * inverse, squares = fmaf(-off, sums.x, sums.y);
  return {near + off, squares < 0.f ? 0.f : squares, count, 0.f};  // not fmaxf: NaN stays
}

template <class T>
__device__ __forceinline__ float rstd_of(float squares, float inverse_n, float eps) {
  const float variance = fmaf(squares, inverse_n, eps);
  return sizeof(T) == 4 ? 1.f / sqrtf(variance) : rsqrtf(variance);
}

// The moments of `count` elements of fp32 of which each thread of a group has those of its vectors k with has(k), zeros in the
// others. `sum` adds up over the group.
template <int kHeld, int kSize, class Has, class Sum>
__device__ __forceinline__ Moments moments_of(const float (&values)[kHeld][kSize], float count, float inverse, bool centred,
                                              Has&& has, Sum&& sum) {
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
    if (!has(k)) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float apart = values[k][i] - mean;
      squares[i % 2] = fmaf(apart, apart, squares[i % 2]);
      distances += apart;
    }
  }
  const float2 sums = sum(make_float2(distances, squares[0] + squares[1]));
  return centred ? corrected(mean, sums.x, sums.y, count) : Moments{0.f, sums.y, count, 0.f};
}

// The same of any dtype in one pass; `from_first` takes the value of the group's first thread, or the mean of all. Distances are
// taken from the mean of the first vector, or vectors, and what they have in common is taken out of their squares. Those
// elements are a share of the row, so that they cannot be far from the mean without making the variance large: at worst its
// error is count / kSize units in the last place of fp32, with one vector.
template <int kHeld, int kSize, class Has, class Sum, class FromFirst>
__device__ __forceinline__ Moments moments_near(const float (&values)[kHeld][kSize], float count, float inverse, bool centred,
                                                Has&& has, Sum&& sum, FromFirst&& from_first) {
  float near = 0.f;
  if (centred) {
    float total[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) total[i] = values[0][i];
#pragma unroll
    for (int by = kSize / 2; by > 0; by /= 2) {
#pragma unroll
      for (int i = 0; i < by; ++i) total[i] += total[i + by];
    }
    near = from_first(total[0]) * (1.f / kSize);
  }
  float distances[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (!has(k)) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float apart = values[k][i] - near;
      squares[i % 2] = fmaf(apart, apart, squares[i % 2]);
      distances[i % 2] += apart;
    }
  }
  if (!centred) return {0.f, sum(squares[0] + squares[1]), count, 0.f};
  return about_mean(near, sum(make_float2(distances[0] + distances[1], squares[0] + squares[1])), count, inverse);
}

// The moments of the row of n elements from those of its warps, which all lanes of a warp read together. Of these, too,
// distances are taken from the first.
__device__ __forceinline__ Moments combine_near(const Moments* states, int count, float n, float inverse_n,
                                                bool centred) {
  const int width = count > kWarp / 2 ? kWarp : count <= 1 ? 1 : 1 << (32 - __clz(count - 1));
  const float near = centred ? states[0].mean : 0.f;
  float2 sums = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int i = int(threadIdx.x) & (width - 1); i < count; i += kWarp) {
    const Moments state = states[i];
    const float apart = state.mean - near, distance = state.count * apart;
    sums.x += distance;
    sums.y += fmaf(distance, apart, state.squares);
  }
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) {
    if (by < width) sums = plus(sums, from_lane(sums, by));
  }
  return centred ? about_mean(near, sums, n, inverse_n) : Moments{0.f, sums.y, n, 0.f};
}

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

// A row's mean and 1 / its deviation, as its elements need them: in one operation for those of 16 bits. Where their mean is
// many deviations away, as in a row of equal elements, the second keeps 12 bits, more than theirs: so products are exact, and
// what is equal to the mean gives zero.
template <class T>
struct Standard {
  float mean, rstd, shift;
  __device__ __forceinline__ Standard() {}
  __device__ __forceinline__ Standard(float mean, float exact) : mean(mean), rstd(exact) {
    if (sizeof(T) < 4 && fabsf(mean * exact) > 1024.f) rstd = __uint_as_float(__float_as_uint(exact) & 0xfffff000u);
    shift = -mean * rstd;
  }
  __device__ __forceinline__ float operator()(float value) const {
    return sizeof(T) == 4 ? (value - mean) * rstd : fmaf(value, rstd, shift);
  }
};

// Ones, in the place of weights that are not there.
template <class T>
__device__ __forceinline__ uint4 ones() {
  const uint32_t one = sizeof(T) == 4 ? 0x3f800000u : pack_pair<T>(1.f, 1.f);
  return make_uint4(one, one, one, one);
}

}  // namespace fuseline
