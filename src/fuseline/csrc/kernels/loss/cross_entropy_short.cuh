// Cross-entropy of rows that a warp's registers hold, without cap, smoothing and class weights, that keep to 16-byte steps and
// all columns of which count: a warp has a row, each lane kHeld vectors of it.
//
// Moves: logits read once, and the gradient written once, if asked. Limit: HBM bandwidth, for few rows what one waits for. us of
// an H100, 8,192 rows of fp32, by cross_entropy_rows and so, in a graph: 128 columns 9.0 and 5.2, with the gradient 17.1 and 8.5;
// 768 columns 23.1 and 12.3, 39.5 and 23.9. 16 and 8 lanes a row of 128 take the same; warps that stay, with their next row on
// its way, 6.1 to 6.8, with the gradient 9.1 to 10.8. Logits that leave the L2 first take 1 to 2 us less where nothing is
// written, and as long beside a gradient.
#pragma once

#include "cross_entropy.cuh"
#include "device/few_rows.cuh"
#include "device/powers.cuh"

namespace fuseline {

using cross_entropy_plans::kShortBlock;

template <class T, int kHeld, bool kGrad>
__global__ void __launch_bounds__(kShortBlock) cross_entropy_short(const CrossEntropy a) {
  constexpr int kSize = kVector<T>;
  const int lane = int(threadIdx.x) % kWarp, vectors = int(a.n) / kSize;
  const int64_t row = int64_t(blockIdx.x) * (kShortBlock / kWarp) + int(threadIdx.x) / kWarp;
  const uint4* const x = static_cast<const uint4*>(a.logits) + row * vectors + lane;
  const int inside = row < a.rows ? vectors - lane : 0;
  known_by_now(number(x) + unsigned(inside));
  begin(a);
  const uint64_t policy = policy_of(!kGrad);
  const int64_t target = row < a.rows ? target_of(a, row) : 0;
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    raw[k] = make_uint4(kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>);
    if (k * kWarp < inside) raw[k] = load_by(x + k * kWarp, policy);
  }
  const bool ignored = is_ignored(a, target), counts = !ignored && is_column(a, target);
  float score = 0.f;
  if (lane == 0 && inside > 0 && counts) score = to_float(reinterpret_cast<const T*>(x)[target]);
  uint32_t most = larger<T>(larger<T>(raw[0].x, raw[0].y), larger<T>(raw[0].z, raw[0].w));
#pragma unroll
  for (int k = 1; k < kHeld; ++k) {
    most = larger<T>(most, larger<T>(larger<T>(raw[k].x, raw[k].y), larger<T>(raw[k].z, raw[k].w)));
  }
  const float unit = unit_of<T>(1.f), largest = max_over_warp(largest_of<T>(most)), max = finite(largest);
  const Top<T> top(largest, unit);
  float value[kHeld][kSize];
  Total<T> powers = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    unpack<T>(raw[k], value[k]);
    top.raise(value[k], unit);
    add_vector<T>(powers, value[k]);
  }
  const float rest = top.rest(unit), sum = float(sum_over_warp(powers) * rest), log_sum = logf(sum);
  if (kGrad) score = __shfl_sync(kAllLanes, score, 0);  // read before anybody writes the gradient in its place
  wait_for_total(a);
  if (row >= a.rows) return;
  const float without = ignored ? 0.f : kInfinity - kInfinity;  // the loss of a row without a class, and its gradient's factor
  if (lane == 0) {
    if (a.statistics) a.statistics[row] = make_float2(max, sum);
    a.loss[row] = counts ? loss_of(a, target, score, max, log_sum, 0.f) : without;
  }
  if constexpr (kGrad) {
    RowGradient gradient{0.f, without, 0.f, 0.f};
    if (counts) gradient = row_gradient(a, scale_of(a, row), target, max, sum, log_sum);
    const float factor = gradient.factor * rest;
    const int column = counts ? int(target) - lane * kSize : -1;  // among the lane's
    uint4* const grad = static_cast<uint4*>(a.grad) + row * vectors + lane;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k * kWarp >= inside) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        value[k][i] = ignored ? 0.f : value[k][i] * factor - (column == k * kWarp * kSize + i ? gradient.main : 0.f);
      }
      grad[k * kWarp] = pack<T>(value[k]);
    }
  }
}

// ---- host ----

template <class T, bool kGrad>
auto short_kernel(int64_t held) -> void (*)(CrossEntropy) {
  if constexpr (sizeof(T) == 4) {
    if (held == 1) return cross_entropy_short<T, 1, kGrad>;
    if (held == 2) return cross_entropy_short<T, 2, kGrad>;
    return held <= 6 ? cross_entropy_short<T, 6, kGrad> : cross_entropy_short<T, 8, kGrad>;
  } else {
    return held <= 3 ? cross_entropy_short<T, 3, kGrad> : cross_entropy_short<T, 4, kGrad>;
  }
}

}  // namespace fuseline
