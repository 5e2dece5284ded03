// The norms' backward for few and short rows: one launch, in which some blocks have rows and others columns.
//
// Moves: as norm_backward_rows.cuh, but x and grad_y twice, the second time out of the L2; no partial sums. Limit: latency.
// The gradient of a row needs nothing of other rows, and the sums over rows need nothing of its gradient: nobody waits for
// another block, as in a cluster (norm_backward_few.cuh), or for a second kernel. All that a thread will read is on its
// way at once.
//
// Threads: a block of columns has a few vectors of each row side by side, and a thread every stride-th row of one. A
// block of rows has whole rows, in registers.
// The gradient of a bias before a dropout is made of rows' gradients: a second launch adds up their columns as they are
// stored.
#pragma once

#include "norm_backward_rows.cuh"

namespace fuseline {

using norm_backward_plans::kApartThreads;

struct ApartNorm {
  NormBackward norm;
  int column_blocks;  // come first; the blocks behind them have rows
  int abreast;        // vectors of a row that a block of columns has, a power of two in a warp
  int across;         // threads of a row: a power of two in a warp, or whole warps
};

template <class X, class Y>
__device__ __forceinline__ void sums_of_columns(const NormBackward& a, int block, int abreast, int vector, int aside) {
  constexpr int kWarps = kApartThreads / kWarp, kSize = kVector<Y>;
  constexpr int kRows = sizeof(X) > sizeof(Y) ? 4 : 8;  // that a thread reads at once
  __shared__ __align__(16) float parts[2][kWarps][kWarp * kSize];
  const int thread = threadIdx.x, down = kApartThreads / abreast;
  const int n = int(a.n), rows = int(a.rows), width = abreast * kSize, column = block * width + vector * kSize;
  ColumnSums<kSize, 2> columns = {};
#pragma unroll 1
  for (int first = aside; first < rows && column < n; first += down * kRows) {
    HeldSlot<X, kSize> x[kRows];
    HeldSlot<Y, kSize> grad_y[kRows];
    float mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first + r * down;
      if (row >= rows) break;
      const int64_t base = row * a.n;
      x[r].load(static_cast<const X*>(a.x) + base, column, n);
      grad_y[r].load(static_cast<const Y*>(a.grad_y) + base, column, n);
      mean[r] = a.mean ? a.mean[row] : 0.f;
      rstd[r] = a.rstd[row];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r * down >= rows) break;
      const float weight[kSize] = {};
      float values[kSize], grad[kSize], sum = 0.f, product_sum = 0.f;  // of rows: not wanted here
      x[r].values(values);
      grad_y[r].values(grad);
      first_pass<kSize, 2, true>(values, grad, weight, mean[r], rstd[r], columns, sum, product_sum);
    }
  }
  // Rows of a warp are added up in it, those of several warps in fp64.
  const int warp = thread / kWarp, lane = thread % kWarp;
  for (int by = abreast; by < kWarp; by *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      columns.weight[i] += from_lane(columns.weight[i], by);
      columns.bias[i] += from_lane(columns.bias[i], by);
    }
  }
  if (lane < abreast) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      *reinterpret_cast<float4*>(&parts[0][warp][lane * kSize + i]) = make_float4(
          columns.weight[i], columns.weight[i + 1], columns.weight[i + 2], columns.weight[i + 3]);
      *reinterpret_cast<float4*>(&parts[1][warp][lane * kSize + i]) = make_float4(
          columns.bias[i], columns.bias[i + 1], columns.bias[i + 2], columns.bias[i + 3]);
    }
  }
  __syncthreads();
  for (int c = thread; c < 2 * width; c += kApartThreads) {
    const int kind = c >= width, place = c - kind * width, to = block * width + place;
    void* const result = kind == 0 ? a.grad_weight : a.grad_bias;
    if (!result || to >= n) continue;
    double sum = 0.0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) sum += parts[kind][part][place];
    if (a.fp32_weights) {
      static_cast<float*>(result)[to] = float(sum);
    } else {
      static_cast<Y*>(result)[to] = from_float<Y>(float(sum));
    }
  }
}

template <class X, class Y, int kSlots>
__device__ __forceinline__ void gradients_of_rows(const NormBackward& a, int block, int across, int vector, int group) {
  constexpr int kWarps = kApartThreads / kWarp, kSize = kVector<Y>;
  __shared__ float2 states[kWarps];
  const int thread = threadIdx.x, groups = kApartThreads / across;
  const int64_t row = int64_t(block) * groups + group;
  const bool there = group < groups && row < a.rows;
  const int n = int(a.n), inside = there ? n : 0;
  const int64_t base = there ? row * a.n : 0;
  const auto first_of = [&](int k) { return (k * across + vector) * kSize; };
  HeldSlot<X, kSize> x[kSlots], grad_sum[kSlots];
  HeldSlot<Y, kSize> grad_y[kSlots];
  float weight[kSlots][kSize];
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    x[k].load(static_cast<const X*>(a.x) + base, first_of(k), inside);
    grad_y[k].load(static_cast<const Y*>(a.grad_y) + base, first_of(k), inside);
    if (a.grad_sum) grad_sum[k].load(static_cast<const X*>(a.grad_sum) + base, first_of(k), inside);
  }
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int first = there ? first_of(k) : n;
    weights_of_columns<Y, false>(a, first, weight[k]);
  }
  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  RowTerms terms;
  terms.mean = there && a.mean ? a.mean[row] : 0.f;
  terms.rstd = there ? a.rstd[row] : 0.f;

  float sums[2] = {};
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    float values[kSize], grad[kSize];
    ColumnSums<kSize, 1> columns = {};  // not wanted here
    x[k].values(values);
    grad_y[k].values(grad);
    first_pass<kSize, 1, true>(values, grad, weight[k], terms.mean, terms.rstd, columns, sums[0], sums[1]);
  }
  sum_in_warp(sums, min(across, kWarp));
  if (across > kWarp) {
    if (thread % kWarp == 0) states[thread / kWarp] = make_float2(sums[0], sums[1]);
    __syncthreads();
  }
  if (!there) return;
  if (across > kWarp) {
    const int warps = across / kWarp;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < warps) sum = plus(sum, states[group * warps + warp]);
    }
    sums[0] = sum.x, sums[1] = sum.y;
  }
  terms.set(a, a.mean, sums[0], sums[1]);
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int first = first_of(k);
    float values[kSize], grad[kSize];
    x[k].values(values);
    grad_y[k].values(grad);
    second_pass<kSize, true>(values, weight[k], terms, grad);
    if (a.grad_sum) {
      grad_sum[k].values(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] += values[i];
    }
    if (a.grad_x) store_slot<X, kSize>(static_cast<X*>(a.grad_x) + base, first, n, grad);
    if (!a.grad_dropped) continue;
    if (a.dropout.seed) {
      float multipliers[kSize];
      dropout_multipliers(a.dropout, seed, base + first, multipliers);
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] *= multipliers[i];
    }
    store_slot<Y, kSize>(static_cast<Y*>(a.grad_dropped) + base, first, n, grad);
  }
}

template <class X, class Y, int kSlots>
__global__ void __launch_bounds__(kApartThreads, kVector<Y> * kSlots > 16 ? 1 : 2) norm_backward_apart(const ApartNorm given) {
  const int block = blockIdx.x;
  const bool has_columns = block < given.column_blocks;
  const int width = has_columns ? given.abreast : given.across;
  int vector = int(threadIdx.x) % width, aside = int(threadIdx.x) / width;
  make_ready(vector), make_ready(aside);
  let_next_start();
  wait_for_earlier();
  if (has_columns) {
    sums_of_columns<X, Y>(given.norm, block, given.abreast, vector, aside);
  } else {
    gradients_of_rows<X, Y, kSlots>(given.norm, block - given.column_blocks, given.across, vector, aside);
  }
}

}  // namespace fuseline
