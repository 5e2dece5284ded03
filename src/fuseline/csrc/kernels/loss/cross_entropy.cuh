// What the forward and the backward of the cross-entropy share: scores, and the gradient of a row from its statistics.
#pragma once

#include "plans/cross_entropy.h"
#include "device/launch.cuh"
#include "device/max_sum.cuh"
#include "device/overlap.cuh"

namespace fuseline {

struct CrossEntropy {
  const void* logits;
  void* grad;                // of the logits; null if not wanted
  const void* target;
  const float* weight;       // of each column, or null
  const float* weight_sum;   // over the columns; null without weight or label_smoothing
  const float* grad_out;     // of each row's loss; null for 1
  const float* total;        // every gradient is divided by it; null for 1
  float* loss;               // of each row
  float2* statistics;        // of each row, or null: the largest score, and the sum of the exponentials against it
  int64_t rows;
  int64_t n;                 // columns that count
  int64_t width;             // columns of a row; those from n on have gradient 0
  int64_t ignore_index;
  float label_smoothing, z_loss;
  float soft_cap, inverse_cap;  // 0 and 0 for none
  bool int32_targets;
  bool one_grad_out;         // for all rows
  bool grad_vectors;         // grad stands in its 16-byte vectors as logits do
  int cluster;
  int part;                  // slots of a warp's part of a row that waits
  int line;                  // bytes, at which these parts begin
  bool counted;              // the launch ahead makes `total`, and waited for what was before it
};

// What a row's gradient is made of: factor * e^(z - shift) - smooth * weight, less `main` at the target.
struct RowGradient {
  float shift, factor, smooth, main;
};

// The launch behind this one may count the targets at once: so it begins only when they are there.
__device__ __forceinline__ void begin(const CrossEntropy& a) {
  if (!a.counted) wait_for_earlier();
  let_next_start();
}

// Before `total` is read, and before a thread ends.
__device__ __forceinline__ void wait_for_total(const CrossEntropy& a) {
  if (a.counted) wait_for_earlier();
}

__device__ __forceinline__ int64_t target_of(const CrossEntropy& a, int64_t row) {
  return a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[row])
                         : static_cast<const int64_t*>(a.target)[row];
}

// A target outside the columns that is not the one to ignore: its row's loss and gradient are NaN.
__device__ __forceinline__ bool is_ignored(const CrossEntropy& a, int64_t target) { return target == a.ignore_index; }
__device__ __forceinline__ bool is_column(const CrossEntropy& a, int64_t target) {
  return target >= 0 && target < a.n;
}

// cap * tanh(x / cap). The hardware's own tanh has 11 bits, too few for a score; this is off by 1e-7 * cap.
template <class T>
__device__ __forceinline__ float capped(float x, float cap, float inverse_cap) {
  if constexpr (sizeof(T) == 4) {
    return cap * tanhf(x * inverse_cap);
  } else {
    const float decay = exponential<T>(-2.f * fabsf(x) * inverse_cap);  // NaN stays
    return copysignf(cap * __fdividef(1.f - decay, 1.f + decay), x);
  }
}

// The scores first .. first + kVector of a row from their 16 bytes; -inf outside the columns that count.
template <class T, class Index>
__device__ __forceinline__ void scores_of(const CrossEntropy& a, const uint4& raw, Index first,
                                          float (&z)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
  unpack<T>(raw, z);
  if (a.soft_cap > 0.f) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) z[i] = capped<T>(z[i], a.soft_cap, a.inverse_cap);
  }
  if (first < 0 || first + kSize > Index(a.n)) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i < 0 || first + i >= Index(a.n)) z[i] = -kInfinity;
    }
  }
}

// The sum of weight * score over a vector, for label smoothing.
template <class T, class Index>
__device__ __forceinline__ float linear_of(const CrossEntropy& a, Index first, const float (&z)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
  float sum = 0.f;
  const bool whole = first >= 0 && first + kSize <= Index(a.n);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (whole || (first + i >= 0 && first + i < Index(a.n))) sum += a.weight ? a.weight[first + i] * z[i] : z[i];
  }
  return sum;
}

// What every gradient of a row is multiplied by.
__device__ __forceinline__ float scale_of(const CrossEntropy& a, int64_t row) {
  return (a.grad_out ? a.grad_out[a.one_grad_out ? 0 : row] : 1.f) / (a.total ? *a.total : 1.f);
}

// The row's gradient from its statistics: the probability of a column is e^(z - max) / sum.
__device__ __forceinline__ RowGradient row_gradient(const CrossEntropy& a, float scale, int64_t target, float max,
                                                    float sum, float log_sum) {
  const float columns = float(a.n);
  const float main = (1.f - a.label_smoothing) * (a.weight ? a.weight[target] : 1.f);
  float spread = a.label_smoothing;
  if (a.weight_sum) spread *= *a.weight_sum / columns;
  const float of_probabilities = main + spread + 2.f * a.z_loss * (max + log_sum);
  return {max, scale * of_probabilities / sum, scale * a.label_smoothing / columns, scale * main};
}

// The gradient of the logits first .. first + kVector from their scores; 0 outside the columns that count.
template <class T, class Index>
__device__ __forceinline__ void gradient_of(const CrossEntropy& a, const RowGradient& row, Index target, Index first,
                                            float (&z)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
  float grad[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) grad[i] = row.factor * exponential<T>(z[i] - row.shift);
  if (row.smooth != 0.f) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const bool counts = first + i >= 0 && first + i < Index(a.n);
      grad[i] -= counts ? (a.weight ? row.smooth * a.weight[first + i] : row.smooth) : 0.f;
    }
  }
  if (target >= first && target < first + kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) grad[i] -= first + i == target ? row.main : 0.f;
  }
  if (a.soft_cap > 0.f) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float part = z[i] * a.inverse_cap;
      grad[i] *= z[i] == -kInfinity ? 0.f : (1.f - part) * (1.f + part);
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) z[i] = grad[i];
}

// The loss of a row whose target has score `z`.
__device__ __forceinline__ float loss_of(const CrossEntropy& a, int64_t target, float z, float max, float log_sum,
                                         float linear) {
  const float lse = max + log_sum;
  const float columns = float(a.n);
  float loss = (1.f - a.label_smoothing) * (a.weight ? a.weight[target] : 1.f) * ((max - z) + log_sum);
  if (a.label_smoothing != 0.f) {
    const float weights = a.weight_sum ? *a.weight_sum / columns : 1.f;
    loss += a.label_smoothing * (weights * lse - linear / columns);
  }
  return loss + a.z_loss * lse * lse;
}

}  // namespace fuseline
