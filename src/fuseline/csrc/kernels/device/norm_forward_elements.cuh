// The norms' forward for rows that do not keep to 16-byte steps, few or not long: the same results as in norm_forward_rows.cuh, for x of
// y's dtype, or for sum = residual + dropout(x + x_bias), which is returned, too.
//
// Moves: as there. Limit: of few rows what one waits for, one thing after the other: its elements, the sums of a warp, those of
// all; two bulk copies, as of many short rows (norm_forward_tiled.cuh), are most of 2 us. Of many, accesses to memory. Threads: a row has a warp, four of them a block, or
// a block; kHeld single elements a thread.
#pragma once

#include "norm_row.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kElementRows = 4;                // of a block, where they have a warp each
constexpr int kMostElementThreads = 1024;      // of a row
constexpr int64_t kLongestElements = 8192;

// kWhole: a row has a block.
template <class T, bool kAdded, bool kMasked, int kHeld, bool kWhole>
__global__ void __launch_bounds__(kWhole ? kMostElementThreads : kElementRows * kWarp) norm_forward_elements(const NormForward a) {
  __shared__ Moments states[kMostElementThreads / kWarp];
  const int n = int(a.n), slot = int(threadIdx.x), threads = int(blockDim.x), warp = slot / kWarp;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, base = row * n;
  const T* const normalized = static_cast<const T*>(kAdded ? a.residual : a.x) + base;
  const T* const added = static_cast<const T*>(a.x) + base;
  let_next_start();
  wait_for_earlier();
  if (!kWhole && row >= a.rows) return;
  const auto has = [&](int k) { return slot + k * threads < n; };
  float values[kHeld][1], others[kAdded ? kHeld : 1], weight[kHeld], bias[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = slot + k * threads;
    values[k][0] = has(k) ? to_float(normalized[i]) : 0.f;
    if constexpr (kAdded) others[k] = has(k) ? to_float(added[i]) : 0.f;
    if constexpr (kMasked) others[k] += a.x_bias && has(k) ? weight_at<T>(a.x_bias, a.fp32_weights, i) : 0.f;
    weight[k] = a.weight && has(k) ? weight_at<T>(a.weight, a.fp32_weights, i) : 1.f;
    bias[k] = a.bias && has(k) ? weight_at<T>(a.bias, a.fp32_weights, i) : 0.f;
  }
  if constexpr (kAdded) {
    const bool drops = kMasked && a.dropout.seed;
    const uint64_t seed = drops ? uint64_t(*a.dropout.seed) : 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = slot + k * threads;
      const float kept = drops ? dropout_multiplier(a.dropout, seed, base + i) : 1.f;
      const T rounded = from_float<T>(fmaf(others[k], kept, values[k][0]));
      values[k][0] = has(k) ? to_float(rounded) : 0.f;
      if (has(k)) static_cast<T*>(a.sum)[base + i] = rounded;
    }
  }
  int count = 0;  // elements of this warp
#pragma unroll
  for (int k = 0; k < kHeld; ++k) count += min(max(n - (warp * kWarp + k * threads), 0), kWarp);
  const auto has_part = [](int, int) { return false; };
  const auto sum = [](auto value) { return sum_over_warp(value); };
  const auto first_of = [](float value) { return __shfl_sync(kAllLanes, value, 0); };
  const float all = float(n), part = kWhole ? float(count) : all, inverse = 1.f / part;
  Moments whole = sizeof(T) == 4 ? moments_of<T>(values, part, inverse, a.centred, has, has_part, sum)
                                 : moments_near<T>(values, part, inverse, a.centred, has, has_part, sum, first_of);
  if constexpr (kWhole) {
    if (slot % kWarp == 0) states[warp] = whole;
    __syncthreads();
    whole = sizeof(T) == 4 ? combine(states, threads / kWarp, all, a.centred)
                           : combine_near(states, threads / kWarp, all, 1.f / all, a.centred);
  }
  const float rstd = rstd_of<T>(whole.squares, 1.f / all, a.eps);
  if (slot == 0) keep_statistics(a, row, whole.mean, rstd);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (has(k)) {
      const float value = fmaf((values[k][0] - whole.mean) * rstd, weight[k], bias[k]);
      static_cast<T*>(a.y)[base + slot + k * threads] = from_float<T>(value);
    }
  }
}

// ---- host ----

// By blocks whose threads have `held` elements each, or if that is 0 as few rows are.
template <class T, bool kAdded, bool kMasked>
int run_elements(const NormForward& a, int held, const Device& device, void* stream) {
  const bool whole = held > 0 || a.n > 2 * kWarp;
  if (held == 0) held = a.n <= kMostElementThreads / 2 ? 1 : a.n <= 4 * kMostElementThreads ? 4 : 8;
  const auto kernel = !whole      ? a.n <= kWarp ? norm_forward_elements<T, kAdded, kMasked, 1, false>
                                                 : norm_forward_elements<T, kAdded, kMasked, 2, false>
                      : held == 1 ? norm_forward_elements<T, kAdded, kMasked, 1, true>
                      : held == 2 ? norm_forward_elements<T, kAdded, kMasked, 2, true>
                      : held == 4 ? norm_forward_elements<T, kAdded, kMasked, 4, true>
                                  : norm_forward_elements<T, kAdded, kMasked, 8, true>;
  const int64_t threads = whole ? divide_up(divide_up(a.n, held), kWarp) * kWarp : kWarp;
  if (threads > kMostElementThreads || (held & (held - 1)) != 0 || held > 8) return FUSELINE_UNSUPPORTED;
  const dim3 block(unsigned(threads), whole ? 1 : kElementRows);
  return launch(kernel, a, divide_up(a.rows, int64_t(block.y)), block, 0, 1, stream, device.clusters);
}

}  // namespace fuseline
