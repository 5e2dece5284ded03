// What the norms' forward does to a thread's elements of a row: the sum that is made on the way, and the norm itself.
#pragma once

#include "moments.cuh"
#include "norm.cuh"

namespace fuseline {

// How many of the elements first .. first + kSize are in 0 .. n.
template <int kSize, class Index>
__device__ __forceinline__ int count_inside(Index first, Index n) {
  const Index below = first < 0 ? -first : 0;
  const Index above = first + kSize > n ? first + kSize - n : 0;
  const Index inside = kSize - below - above;
  return inside > 0 ? int(inside) : 0;
}

// Calls value(i) for the elements of a slot that are inside the row.
template <int kSize, class Index, class Value>
__device__ __forceinline__ void each_inside(Index first, Index n, Value&& value) {
  if (first >= 0 && first + kSize <= n) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) value(i);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= 0 && first + i < n) value(i);
    }
  }
}

// values = residual + dropout(values + x_bias), elements first .. of the row whose first element is number `base` of the
// tensor; not rounded.
template <class Y, bool kAligned, class Index, int kSize>
__device__ __forceinline__ void add_residual(const NormForward& a, uint64_t seed, int64_t base, Index first, Index n,
                                             const float (&residual)[kSize], float (&values)[kSize]) {
  if (a.x_bias && !(kAligned && first >= n)) {
    float bias[kSize] = {};
    load_weights<Y, kAligned>(a.x_bias, a.fp32_weights, first, n, bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += bias[i];
  }
  if (a.dropout.seed) {
    float kept[kSize];
    dropout_row<kSize, !kAligned>(a.dropout, seed, base + first, kept);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fmaf(values[i], kept[i], residual[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += residual[i];
  }
}

// The same for row `row`.
template <class Y, bool kAligned, class Index, int kSize>
__device__ __forceinline__ void add_residual(const NormForward& a, int64_t row, Index first, Index n,
                                             const float (&residual)[kSize], float (&values)[kSize]) {
  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  add_residual<Y, kAligned>(a, seed, row * a.n, first, n, residual, values);
}

// values = (values - mean) * rstd * weight + bias, the elements first .. of the row.
template <class Y, bool kAligned, class Index, int kSize>
__device__ __forceinline__ void normalize(const NormForward& a, Index first, Index n, float mean, float rstd,
                                          float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] = (values[i] - mean) * rstd;
  if (kAligned && first >= n) return;
  if (a.weight) {
    float weight[kSize] = {};
    load_weights<Y, kAligned>(a.weight, a.fp32_weights, first, n, weight);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] *= weight[i];
  }
  if (a.bias) {
    float bias[kSize] = {};
    load_weights<Y, kAligned>(a.bias, a.fp32_weights, first, n, bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += bias[i];
  }
}

__device__ __forceinline__ float rstd_of(const NormForward& a, const Moments& row) {
  return 1.f / sqrtf(row.squares / float(a.n) + a.eps);
}

__device__ __forceinline__ void keep_statistics(const NormForward& a, int64_t row, float mean, float rstd) {
  if (a.mean) a.mean[row] = mean;
  if (a.rstd) a.rstd[row] = rstd;
}

}  // namespace fuseline
