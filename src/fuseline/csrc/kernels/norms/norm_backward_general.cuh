// The norms' backward for rows of any length at any address. No model's rows come here on a device with clusters: those keep to
// 16-byte steps, and other kernels move them once.
//
// Moves: x and grad_y (and grad_sum) twice or three times, of which the caches give some; grad_x (and grad_dropped) once. Limit:
// HBM bandwidth, and instructions: an element is an access. A kernel has the gradients of rows, another the sums over rows.
//
// Threads: a row is a warp's, a block's or, of more elements than its threads have at once, a cluster's. A thread has every
// stride-th element, kGeneralHeld at once; those that it began with stay in registers until the row has met, the others are read
// again. Sums over rows: a warp has neighbouring columns, and the warps of a block, and some blocks (`shares`), have rows of
// their own.
#pragma once

#include "norm_gradient.cuh"
#include "device/overlap.cuh"

namespace fuseline {

using norm_backward_plans::kGeneralHeld;
using norm_backward_plans::kGeneralThreads;
using norm_backward_plans::kGeneralWarps;
constexpr int kGeneralRows = 6;  // rows of which a thread reads its column at once

struct GeneralNorm {
  NormBackward norm;
  float2* terms;  // RowTerms::offset and slope of each row, for the sums of what it gives; null: not wanted
  int column_blocks, shares;
};

template <class Y>
__device__ __forceinline__ float weight_of(const NormBackward& a, int64_t c) {
  return a.fp32_weights ? static_cast<const float*>(a.weight)[c] : to_float(static_cast<const Y*>(a.weight)[c]);
}

template <class X, class Y>
__global__ void __launch_bounds__(kGeneralThreads, 2) norm_backward_general(const GeneralNorm given) {
  constexpr int kHeld = kGeneralHeld;
  __shared__ float2 states[kGeneralWarps], of_blocks[kMaxCluster];
  const NormBackward& a = given.norm;
  const int cluster = a.cluster, rank = int(blockIdx.x) & (cluster - 1);
  if (cluster > 1) cluster_arrive();  // nobody writes to a block that has not begun
  let_next_start();
  wait_for_earlier();
  const int threads = cluster * int(blockDim.x), lane = rank * int(blockDim.x) + int(threadIdx.x);
  const int64_t row = int64_t(blockIdx.x) / cluster * blockDim.y + threadIdx.y, base = row * a.n;
  const int64_t n = row < a.rows ? a.n : 0, step = int64_t(kHeld) * threads;
  RowTerms terms;
  terms.mean = n > 0 && a.mean ? a.mean[row] : 0.f;
  terms.rstd = n > 0 ? a.rstd[row] : 0.f;
  const auto left_from = [&](int64_t first) { return int(min(n - first, step)); };
  // x - mean, and grad_y * weight, of elements first, first + threads, ..; zeros beyond the row.
  const auto load = [&](int64_t first, float (&apart)[kHeld], float (&weighted)[kHeld]) {
    const X* const x = static_cast<const X*>(a.x) + base + first;
    const Y* const grad_y = static_cast<const Y*>(a.grad_y) + base + first;
    const int left = left_from(first);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      apart[k] = k * threads < left ? to_float(x[k * threads]) - terms.mean : 0.f;
      weighted[k] = k * threads < left ? to_float(grad_y[k * threads]) : 0.f;
    }
    if (!a.weight) return;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k * threads < left) weighted[k] *= weight_of<Y>(a, first + k * threads);
    }
  };
  float2 sums = make_float2(0.f, 0.f);
  const auto add = [&](const float (&apart)[kHeld], const float (&weighted)[kHeld]) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      sums.x += weighted[k];
      sums.y += weighted[k] * apart[k];
    }
  };
  float apart[kHeld], weighted[kHeld];
  load(lane, apart, weighted);
  add(apart, weighted);
#pragma unroll 1
  for (int64_t first = lane + step; first < n; first += step) {
    float more[kHeld], more_weighted[kHeld];
    load(first, more, more_weighted);
    add(more, more_weighted);
  }
  sums = sum_of_lanes(sums, kWarp);
  if (blockDim.x > kWarp) {  // the block has one row
    if (threadIdx.x % kWarp == 0) states[threadIdx.x / kWarp] = sums;
    __syncthreads();
    sums = make_float2(0.f, 0.f);
    for (int warp = 0; warp < int(blockDim.x) / kWarp; ++warp) sums = plus(sums, states[warp]);
  }
  if (cluster > 1) {
    cluster_wait();
    if (int(threadIdx.x) < cluster) {
      store_in_cluster(&of_blocks[rank].x, int(threadIdx.x), __float_as_uint(sums.x));
      store_in_cluster(&of_blocks[rank].y, int(threadIdx.x), __float_as_uint(sums.y));
    }
    cluster_arrive();
    cluster_wait();
    sums = make_float2(0.f, 0.f);
    for (int block = 0; block < cluster; ++block) sums = plus(sums, of_blocks[block]);
  }
  terms.set(a, a.mean, sums.x, sums.y);
  if (given.terms && lane == 0 && n > 0) given.terms[row] = make_float2(terms.offset, terms.slope);
  if (!a.grad_x && !a.grad_dropped) return;

  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const auto finish = [&](int64_t first, float (&apart)[kHeld], float (&weighted)[kHeld]) {
    const int64_t at = base + first;
    const int left = left_from(first);
    // The gradients take the place of what they are made of.
#pragma unroll
    for (int k = 0; k < kHeld; ++k) weighted[k] = weighted[k] * terms.scale - terms.offset - apart[k] * terms.slope;
    if (a.grad_sum) {
      const X* const grad_sum = static_cast<const X*>(a.grad_sum) + at;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (k * threads < left) weighted[k] += to_float(grad_sum[k * threads]);
      }
    }
    if (a.grad_x) {
      X* const grad_x = static_cast<X*>(a.grad_x) + at;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (k * threads < left) grad_x[k * threads] = from_float<X>(weighted[k]);
      }
    }
    if (!a.grad_dropped) return;
    Y* const grad_dropped = static_cast<Y*>(a.grad_dropped) + at;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k * threads >= left) continue;
      const float kept = a.dropout.seed ? dropout_multiplier(a.dropout, seed, at + k * threads) : 1.f;
      grad_dropped[k * threads] = from_float<Y>(weighted[k] * kept);
    }
  };
  finish(lane, apart, weighted);
#pragma unroll 1
  for (int64_t first = lane + step; first < n; first += step) {
    load(first, apart, weighted);
    finish(first, apart, weighted);
  }
}

// The sums over rows of grad_y * x_hat, of grad_y and of what rows' gradients are behind the dropout.
template <class X, class Y>
__global__ void __launch_bounds__(kGeneralThreads, 2) norm_backward_general_sums(const GeneralNorm given) {
  constexpr int kRows = kGeneralRows, kKinds = kSumsOfAddedNorm;
  __shared__ float parts[kKinds][kGeneralWarps][kWarp];
  let_next_start();
  wait_for_earlier();
  const NormBackward& a = given.norm;
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int share = int(blockIdx.x) / given.column_blocks;
  const int64_t c = int64_t(int(blockIdx.x) % given.column_blocks) * kWarp + lane;
  const int64_t step = int64_t(given.shares) * kGeneralWarps;  // between rows of a thread
  const X* const x = static_cast<const X*>(a.x) + c;
  const Y* const grad_y = static_cast<const Y*>(a.grad_y) + c;
  const X* const grad_sum = given.terms && a.grad_sum ? static_cast<const X*>(a.grad_sum) + c : nullptr;
  const uint64_t seed = given.terms && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const float weight = given.terms && a.weight && c < a.n ? weight_of<Y>(a, c) : 1.f;
  float weight_sum = 0.f, bias_sum = 0.f, x_bias_sum = 0.f;
  const int64_t rows = c < a.n ? a.rows : 0;
#pragma unroll 1
  for (int64_t first = share * kGeneralWarps + warp; first < rows; first += kRows * step) {
    float apart[kRows], grad[kRows], rstd[kRows], more[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * step;
      const bool there = row < rows;
      apart[r] = there ? to_float(x[row * a.n]) - (a.mean ? a.mean[row] : 0.f) : 0.f;
      grad[r] = there ? to_float(grad_y[row * a.n]) : 0.f;
      rstd[r] = there ? a.rstd[row] : 0.f;
      more[r] = there && grad_sum ? to_float(grad_sum[row * a.n]) : 0.f;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      weight_sum += grad[r] * (apart[r] * rstd[r]);
      bias_sum += grad[r];
      if (!given.terms || first + r * step >= rows) continue;
      const float2 terms = given.terms[first + r * step];
      const float scale = a.mean && a.n == 1 ? 0.f : rstd[r];
      const float of_row = grad[r] * weight * scale - terms.x - apart[r] * terms.y + more[r];
      x_bias_sum += a.dropout.seed ? of_row * dropout_multiplier(a.dropout, seed, (first + r * step) * a.n + c) : of_row;
    }
  }
  parts[0][warp][lane] = weight_sum, parts[1][warp][lane] = bias_sum, parts[2][warp][lane] = x_bias_sum;
  __syncthreads();
  const int kind = warp;
  if (kind >= kKinds || c >= a.n) return;
  void* const result = kind == 0 ? a.grad_weight : kind == 1 ? a.grad_bias : a.grad_x_bias;
  if (!result) return;
  double sum = 0.0;
#pragma unroll
  for (int part = 0; part < kGeneralWarps; ++part) sum += parts[kind][part][lane];
  if (given.shares > 1) {
    a.partials[(int64_t(kind) * given.shares + share) * a.columns + c] = float(sum);
  } else if (a.fp32_weights) {
    static_cast<float*>(result)[c] = float(sum);
  } else {
    static_cast<Y*>(result)[c] = from_float<Y>(float(sum));
  }
}

}  // namespace fuseline
