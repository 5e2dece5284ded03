// The norms' forward for few short rows that do not keep to 16-byte steps: the same results as in norm_forward_rows.cuh,
// for x of y's dtype, or for sum = residual + x, which is returned, too.
//
// Moves: as there. Limit: what a row waits for, one after the other: its elements, the sums of a warp; two bulk copies, as
// of many such rows (norm_forward_tiled.cuh), are most of 2 us. Threads: a warp a row, kHeld single elements a lane.
#pragma once

#include "norm_row.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kElementWarps = 4;  // of a block

template <class T, bool kAdded, int kHeld>
__global__ void __launch_bounds__(kElementWarps * kWarp) norm_forward_elements(const NormForward a) {
  const int n = int(a.n), lane = int(threadIdx.x) % kWarp;
  const int64_t row = int64_t(blockIdx.x) * kElementWarps + int(threadIdx.x) / kWarp, base = row * n;
  const T* const normalized = static_cast<const T*>(kAdded ? a.residual : a.x) + base;
  const T* const added = static_cast<const T*>(a.x) + base;
  let_next_start();
  wait_for_earlier();
  if (row >= a.rows) return;
  float values[kHeld][1], others[kAdded ? kHeld : 1], weight[kHeld], bias[kHeld];
  const auto has = [&](int k) { return lane + k * kWarp < n; };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = lane + k * kWarp;
    values[k][0] = has(k) ? to_float(normalized[i]) : 0.f;
    if constexpr (kAdded) others[k] = has(k) ? to_float(added[i]) : 0.f;
    weight[k] = a.weight && has(k) ? weight_at<T>(a.weight, a.fp32_weights, i) : 1.f;
    bias[k] = a.bias && has(k) ? weight_at<T>(a.bias, a.fp32_weights, i) : 0.f;
  }
  if constexpr (kAdded) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const T rounded = from_float<T>(values[k][0] + others[k]);
      values[k][0] = to_float(rounded);
      if (has(k)) static_cast<T*>(a.sum)[base + lane + k * kWarp] = rounded;
    }
  }
  const auto has_part = [](int, int) { return false; };
  const auto sum = [](auto value) { return sum_over_warp(value); };
  const auto first_of = [](float value) { return __shfl_sync(kAllLanes, value, 0); };
  const float inverse = 1.f / float(n);
  const Moments whole = sizeof(T) == 4
                            ? moments_of<T>(values, float(n), inverse, a.centred, has, has_part, sum)
                            : moments_near<T>(values, float(n), inverse, a.centred, has, has_part, sum, first_of);
  const float rstd = rstd_of<T>(whole.squares, inverse, a.eps);
  if (lane == 0) keep_statistics(a, row, whole.mean, rstd);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (has(k)) {
      const float value = fmaf((values[k][0] - whole.mean) * rstd, weight[k], bias[k]);
      static_cast<T*>(a.y)[base + lane + k * kWarp] = from_float<T>(value);
    }
  }
}

// ---- host ----

template <class T, bool kAdded>
int run_elements(const NormForward& a, const Device& device, void* stream) {
  const auto kernel = a.n <= kWarp ? norm_forward_elements<T, kAdded, 1> : norm_forward_elements<T, kAdded, 8>;
  return launch(kernel, a, divide_up(a.rows, kElementWarps), dim3(kElementWarps * kWarp), 0, 1, stream, device.clusters);
}

}  // namespace fuseline
