// The norms' forward for rows of 16 bits that keep to 16-byte steps, of more than a warp, so few that a block has one and each
// thread a vector: the same results as in norm_forward_held.cuh, of x or of sum = residual + x, with weights of rows' dtype.
//
// Moves: x (and residual) read once, y (and sum) written once. Limit: what a row waits for, one after the other: its elements,
// the sums of a warp, those of all. Addresses are there before the kernel ahead has ended, and no step has a branch.
#pragma once

#include "device/few_rows.cuh"
#include "device/launch.cuh"
#include "norm_row.cuh"

namespace fuseline {

// A name of its own in all of the library, whose linker keeps one `launch` a name: norm_backward_few.cuh has FewNorm.
struct FewNormForward {
  const uint4 *x, *residual, *weight, *bias;
  uint4 *y, *sum;
  float *mean, *rstd;
  int vectors;
  float n, inverse_n, eps;
};

// kWarps: of a row at most, 4 or those of a block. kCentred: a layer norm.
template <class T, bool kAdded, bool kCentred, int kWarps>
__global__ void __launch_bounds__(kMostThreads, 2) norm_forward_few(const FewNormForward a) {
  constexpr int kSize = kVector<T>;
  using State = std::conditional_t<kCentred, Moments, float>;
  __shared__ __align__(16) State states[kWarps];
  let_next_start();
  const int slot = int(threadIdx.x), warps = int(blockDim.x) / kWarp;
  const int64_t at = int64_t(blockIdx.x) * a.vectors + slot;
  const bool inside = slot < a.vectors;
  const float count = float(min(a.vectors - slot / kWarp * kWarp, kWarp) * kSize), inverse = 1.f / count;  // of this warp
  const uint4* const x = (kAdded ? a.residual : a.x) + at;
  const uint4* const added = a.x + at;
  const uint4* const weight_at = a.weight + slot;
  const uint4* const bias_at = a.bias + slot;
  uint4* const y = a.y + at;
  uint4* const sum = a.sum + at;
  const int has = (a.weight ? 1 : 0) | (a.bias ? 2 : 0);
  known_by_now(number(x) + number(y) + number(weight_at) + number(bias_at) + (kAdded ? number(added) + number(sum) : 0) +
               __float_as_uint(kCentred ? inverse : 0.f) + unsigned(has));
  wait_for_earlier();
  uint4 raw = make_uint4(0, 0, 0, 0), branch = raw, weight = ones<T>(), bias = raw;
  if (inside) {
    raw = load_now(x);
    if (kAdded) branch = load_now(added);
    if (has & 1) weight = __ldg(weight_at);
    if (has & 2) bias = __ldg(bias_at);
  }
  float values[kSize];
  unpack<T>(raw, values);
  if constexpr (kAdded) {
    float others[kSize];
    unpack<T>(branch, others);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += others[i];
    const uint4 rounded = pack<T>(values);
    if (inside) store_now(sum, rounded);
    unpack<T>(rounded, values);
  }
  float near = 0.f;
  if constexpr (kCentred) {
    float total[kSize / 2];
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) total[i] = values[i] + values[i + kSize / 2];
    near = __shfl_sync(kAllLanes, (total[0] + total[2]) + (total[1] + total[3]), 0) * (1.f / kSize);
  }
  float distances[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float apart = kCentred && !inside ? 0.f : values[i] - near;
    squares[i % 2] = fmaf(apart, apart, squares[i % 2]);
    distances[i % 2] += apart;
  }
  const int warp = slot / kWarp;
  Moments whole{0.f, 0.f, a.n, 0.f};
  if constexpr (kCentred) {
    const float2 sums = sum_of_lanes(make_float2(distances[0] + distances[1], squares[0] + squares[1]), kWarp);
    if (slot % kWarp == 0) states[warp] = about_mean(near, sums, count, inverse);
    __syncthreads();
    if constexpr (kWarps == 4) {
      const float first = states[0].mean;
      float2 all = make_float2(0.f, 0.f);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const Moments state = states[w];
        const float apart = state.mean - first, distance = state.count * apart;
        if (w < warps) all = plus(all, make_float2(distance, fmaf(distance, apart, state.squares)));
      }
      whole = about_mean(first, all, a.n, a.inverse_n);
    } else {
      whole = combine_few<kWarps>(states, warps, a.n, a.inverse_n, true);
    }
  } else {
    const float own = sum_of_lanes(squares[0] + squares[1], kWarp);
    if (slot % kWarp == 0) states[warp] = own;
    __syncthreads();
    if constexpr (kWarps == 4) {
      const float4 four = *reinterpret_cast<const float4*>(states);
      whole.squares = (four.x + (warps > 1 ? four.y : 0.f)) + ((warps > 2 ? four.z : 0.f) + (warps > 3 ? four.w : 0.f));
    } else {
      const int lane = slot % kWarps;
      whole.squares = sum_of_lanes(lane < warps ? states[lane] : 0.f, kWarps);
    }
  }
  const float rstd = rstd_of<T>(whole.squares, a.inverse_n, a.eps);
  const Standard<T> standard(whole.mean, rstd);
  if (inside) {
    float weights[kSize], biases[kSize];
    unpack<T>(weight, weights);
    unpack<T>(bias, biases);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weights[i], biases[i]);
    store_now(y, pack<T>(values));
  }
  if (slot == 0) {
    if (a.mean) a.mean[blockIdx.x] = whole.mean;
    if (a.rstd) a.rstd[blockIdx.x] = rstd;
  }
}

// ---- host ----

template <class T, bool kAdded>
int launch_few(const NormForward& a, const LaunchShape& shape, const Device& device, void* stream) {
  const auto vectors = [](const void* at) { return static_cast<const uint4*>(at); };
  const FewNormForward few{vectors(a.x),
                           vectors(a.residual),
                           vectors(a.weight),
                           vectors(a.bias),
                           static_cast<uint4*>(a.y),
                           static_cast<uint4*>(a.sum),
                           a.mean,
                           a.rstd,
                           int(a.n / kVector<T>),
                           float(a.n),
                           float(1.0 / double(a.n)),
                           a.eps};
  constexpr int kBlock = kMostThreads / kWarp;
  const bool four = shape.threads <= 4 * kWarp;
  const auto kernel = a.centred ? (four ? norm_forward_few<T, kAdded, true, 4> : norm_forward_few<T, kAdded, true, kBlock>)
                                : (four ? norm_forward_few<T, kAdded, false, 4> : norm_forward_few<T, kAdded, false, kBlock>);
  return launch(kernel, few, shape, device, stream);
}

}  // namespace fuseline
