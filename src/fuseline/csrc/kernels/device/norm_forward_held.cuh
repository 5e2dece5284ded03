// The norms' forward for rows of y's dtype that keep to 16-byte steps and that threads hold in registers: y = (x - mean) *
// rstd * weight + bias over each row (mean 0 in an RMS norm).
//
// Moves: x read once, y written once; weight and bias come from cache. Does: about 9 operations an element. Limit: HBM
// bandwidth. Threads: a row belongs to a part of a warp, a warp or a block, kHeld vectors a thread; of rows that are a
// warp's or less a thread has kRows, all on their way at a time, and its weights once.
#pragma once

#include "norm_row.cuh"

namespace fuseline {

constexpr int kFewStates = 8;

// The moments of a row from those of its few warps, read by every thread for itself: without a shuffle.
template <class T>
__device__ __forceinline__ Moments combine_few(const Moments* states, int count, float n, float inverse_n,
                                               bool centred) {
  float mean = 0.f;
  if (centred) {
    float total = 0.f;
#pragma unroll 4
    for (int i = 0; i < count; ++i) total = fmaf(states[i].count, states[i].mean, total);
    mean = mean_of(total, n, inverse_n);
  }
  float squares = 0.f, distances = 0.f;
#pragma unroll 2
  for (int i = 0; i < count; ++i) {
    const Moments state = states[i];
    const float apart = state.mean - mean;
    squares += fmaf(state.count * apart, apart, state.squares);
    if (sizeof(T) == 4) distances = fmaf(state.count, apart, distances);
  }
  return sizeof(T) == 4 && centred ? corrected(mean, distances, squares, n) : Moments{mean, squares, n, 0.f};
}

constexpr int held_blocks(bool one_warp, int vectors) { return !one_warp ? 2 : vectors > 4 ? 3 : 4; }

template <class T, int kHeld, int kRows, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), held_blocks(kOneWarp, kHeld* kRows))
    norm_forward_held(const NormForward a) {
  __shared__ Moments shared[2 * kMaxStates];
  let_next_start();
  wait_for_earlier();
  Group<Moments, kOneWarp> group(shared, 1);
  constexpr int kSize = kVector<T>;
  const int n = int(a.n), step = group.threads * kSize, start = group.lane * kSize;
  const int64_t first = int64_t(group.first) * (blockDim.y * kRows) + threadIdx.y;
  uint4 raw[kRows][kHeld];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * int(blockDim.y);
    const int inside = row < a.rows ? n : 0;
    const T* const x = static_cast<const T*>(a.x) + row * a.n;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Not past the L1, which was measured to cost a hundredth, as was to stream y.
      const int column = start + k * step;
      raw[r][k] = column < inside ? *reinterpret_cast<const uint4*>(x + column) : make_uint4(0, 0, 0, 0);
    }
  }
  // Weights of rows' dtype are on their way with the rows, where there are registers for both.
  constexpr bool kEarly = kHeld <= 2;
  const bool early = kEarly && (sizeof(T) == 4 || !a.fp32_weights);
  uint4 weight[kEarly ? kHeld : 1], bias[kEarly ? kHeld : 1];
  if constexpr (kEarly) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int column = start + k * step;
      weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
      if (!early || column >= n) continue;
      if (a.weight) weight[k] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.weight) + column));
      if (a.bias) bias[k] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.bias) + column));
    }
  }
  const float inverse_n = 1.f / float(n);
  float count = float(n), inverse = inverse_n;
  if (!group.in_one_warp()) {  // of this warp's elements
    const int from = start - group.lane % kWarp * kSize;
    int mine = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) mine += count_inside<kWarp * kSize>(from + k * step, n);
    count = float(mine), inverse = 1.f / float(max(mine, 1));
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float values[kHeld][kSize];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) unpack<T>(raw[r][k], values[k]);
    const Moments warp = moments_of<T>(
        values, count, inverse, a.centred, [&](int k) { return start + k * step < n; }, [](int, int) { return false; },
        [&](auto value) { return group.warp_sum(value); });
    Moments whole = warp;
    if (!group.in_one_warp()) {
      const Moments* const states = group.publish(warp);
      whole = group.states <= kFewStates ? combine_few<T>(states, group.states, float(n), inverse_n, a.centred)
                                         : combine(states, group.states, float(n), a.centred);
    }
    const float rstd = rstd_of<T>(whole.squares, inverse_n, a.eps);
    const int64_t row = first + r * int(blockDim.y);
    if (row >= a.rows) return;
    if (group.lane == 0) keep_statistics(a, row, whole.mean, rstd);
    T* const y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int column = start + k * step;
      if (column >= n) continue;
      if (kEarly && early) {
        float weights[kSize], biases[kSize];
        unpack<T>(weight[kEarly ? k : 0], weights);
        unpack<T>(bias[kEarly ? k : 0], biases);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[k][i] = fmaf((values[k][i] - whole.mean) * rstd, weights[i], biases[i]);
        }
      } else {
        normalize<T, true>(a, column, n, whole.mean, rstd, values[k]);
      }
      *reinterpret_cast<uint4*>(y + column) = pack<T>(values[k]);
    }
  }
}

}  // namespace fuseline
