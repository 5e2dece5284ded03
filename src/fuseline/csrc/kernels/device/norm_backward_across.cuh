// The norms' backward for few of the longest rows: a row goes over all multiprocessors, in two launches.
//
// Moves: as norm_backward_rows.cuh, but x and grad_y twice, the second time out of the L2; no partial sums of columns. Limit:
// the latency of two launches, and HBM bandwidth. A cluster is an eighth of the GPU, and clusters that have whole rows leave
// partial sums of all columns for another launch; here a block has a few columns of all rows, and their sums.
//
// Threads: a block has `across` vectors of a row side by side, and each thread one in every (threads / across)-th row, which it
// fetches into a ring of its own. The first launch leaves two sums a row and block, and writes those over rows. The second
// fetches its rows while the first runs, which lets it start once all that it reads but these sums is there; the latest rows
// first, which the L2 has still.
#pragma once

#include "norm_backward_rows.cuh"
#include "ring.cuh"

namespace fuseline {

constexpr int kAcrossThreads = 512, kAcrossStages = kMostStages;  // of a block; rows of a thread on their way

struct AcrossNorm {
  NormBackward norm;
  float2* row_sums;  // [rows, blocks]
  int across;        // threads side by side in a row: whole warps
};

// What a thread has of a row, from its place in the ring, or as it comes. kAdded: grad_sum, too, if there is one.
template <class X, class Y, bool kShifted, bool kAdded>
struct AcrossRow {
  static constexpr int kSize = kVector<Y>, kXVectors = kSize / kVector<X>;
  HeldSlot<X, kSize, kShifted> x, grad_sum;
  HeldSlot<Y, kSize, kShifted> grad_y;

  // Vectors of the ring: x, grad_y, grad_sum. Bytes of all threads' rings, where their sums over rows meet later.
  __host__ __device__ static int parts(const NormBackward& a) {
    return kXVectors + 1 + (kAdded && a.grad_sum ? kXVectors : 0);
  }
  __host__ __device__ static int room(const NormBackward& a, int threads) {
    return threads * (kShifted ? kSize * int(sizeof(float)) : kAcrossStages * parts(a) * 16);
  }

  static __device__ __forceinline__ void fetch(const NormBackward& a, uint4* to, int step, int64_t at) {
#pragma unroll
    for (int v = 0; v < kXVectors; ++v) {
      copy_async<16>(to + v * step, static_cast<const X*>(a.x) + at + v * kVector<X>, true);
      if (kAdded && a.grad_sum) {
        copy_async<16>(to + (kXVectors + 1 + v) * step, static_cast<const X*>(a.grad_sum) + at + v * kVector<X>, true);
      }
    }
    copy_async<16>(to + kXVectors * step, static_cast<const Y*>(a.grad_y) + at, true);
  }

  __device__ __forceinline__ void take(const NormBackward& a, const uint4* from, int step) {
#pragma unroll
    for (int v = 0; v < kXVectors; ++v) {
      x.raw[v] = from[v * step];
      if (kAdded && a.grad_sum) grad_sum.raw[v] = from[(kXVectors + 1 + v) * step];
    }
    grad_y.raw[0] = from[kXVectors * step];
  }

  __device__ __forceinline__ void load(const NormBackward& a, int row, int column) {
    const int64_t at = row * a.n, after = (a.rows - row) * a.n;
    const int n = int(a.n);
    x.load(static_cast<const X*>(a.x) + at, column, n, at, after);
    grad_y.load(static_cast<const Y*>(a.grad_y) + at, column, n, at, after);
    if (kAdded && a.grad_sum) grad_sum.load(static_cast<const X*>(a.grad_sum) + at, column, n, at, after);
  }

  __device__ __forceinline__ void values(const NormBackward& a, int row, int column, float mean, float (&value)[kSize],
                                         float (&grad)[kSize]) const {
    const int64_t at = row * a.n;
    x.values(kShifted ? elements_into_vector(static_cast<const X*>(a.x) + at) : 0, value);
    grad_y.values(kShifted ? elements_into_vector(static_cast<const Y*>(a.grad_y) + at) : 0, grad);
    if constexpr (kShifted) {  // beyond the row stand others
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (column + i >= int(a.n)) value[i] = mean, grad[i] = 0.f;
      }
    }
  }
};

// Adds up what a block's threads have of each of its columns, in fp64, and writes it; all threads call.
template <class Y, int kSize>
__device__ __forceinline__ void write_columns_across(const NormBackward& a, void* result, float* parts, int across,
                                                     const float (&mine)[kSize]) {
  if (!result) return;
  const int thread = int(threadIdx.x), threads = int(blockDim.x), down = threads / across, step = across * kSize;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    *reinterpret_cast<float4*>(parts + thread * kSize + i) = make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
  }
  __syncthreads();
  for (int c = thread; c < step; c += threads) {
    const int64_t to = int64_t(blockIdx.x) * step + c;
    if (to >= a.n) break;
    double sum = 0.0;
#pragma unroll 4
    for (int p = 0; p < down; ++p) sum += parts[p * step + c];
    if (a.fp32_weights) {
      static_cast<float*>(result)[to] = float(sum);
    } else {
      static_cast<Y*>(result)[to] = from_float<Y>(float(sum));
    }
  }
}

template <class X, class Y, bool kShifted>
__global__ void __launch_bounds__(kAcrossThreads, kShifted ? 1 : 2) norm_backward_across_sums(const AcrossNorm given) {
  using Row = AcrossRow<X, Y, kShifted, false>;
  constexpr int kSize = Row::kSize, kTogether = kShifted ? 2 : kAcrossStages;
  extern __shared__ __align__(128) unsigned char memory[];
  const NormBackward& a = given.norm;
  const int n = int(a.n), rows = int(a.rows), thread = int(threadIdx.x), threads = int(blockDim.x), across = given.across;
  const int down = threads / across, warps = across / kWarp, lane = thread % kWarp, parts = Row::parts(a);
  int vector = thread % across, aside = thread / across;
  make_ready(vector), make_ready(aside);
  const int column = (int(blockIdx.x) * across + vector) * kSize;
  const bool inside = column < n;
  uint4* const ring = reinterpret_cast<uint4*>(memory) + thread;
  float2* const statistics = reinterpret_cast<float2*>(memory + Row::room(a, threads));
  float2* const warp_sums = statistics + rows;
  const auto place = [&](int turn) { return ring + turn % kAcrossStages * parts * threads; };
  const auto fetch = [&](int turn) {
    const int row = aside + turn * down;
    if (inside && row < rows) Row::fetch(a, place(turn), threads, row * a.n + column);
    commit_copies();
  };

  wait_for_earlier();
  let_next_start();  // what starts may read all that earlier launches wrote
  if constexpr (!kShifted) {
#pragma unroll
    for (int turn = 0; turn < kAcrossStages; ++turn) fetch(turn);
  }
  float weight[kSize];
  weights_of_columns<Y, kShifted>(a, inside ? column : n, weight);
  for (int row = thread; row < rows; row += threads) statistics[row] = make_float2(a.mean ? a.mean[row] : 0.f, a.rstd[row]);
  __syncthreads();

  ColumnSums<kSize, 2> columns = {};
  const int turns = (rows + down - 1) / down;
#pragma unroll 1
  for (int turn = 0; turn < turns; turn += kTogether) {
    float sums[2 * kTogether] = {};
    [[maybe_unused]] Row held[kShifted ? kTogether : 1];
    if constexpr (kShifted) {
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (aside + (turn + t) * down < rows) held[t].load(a, aside + (turn + t) * down, column);
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int row = aside + (turn + t) * down;
      if constexpr (!kShifted) wait_for_oldest(kAcrossStages);
      if (inside && row < rows) {
        if constexpr (!kShifted) held[0].take(a, place(turn + t), threads);
        const float2 of_row = statistics[row];
        float values[kSize], grad[kSize];
        held[kShifted ? t : 0].values(a, row, column, of_row.x, values, grad);
        first_pass<kSize, 2, true>(values, grad, weight, of_row.x, of_row.y, columns, sums[2 * t], sums[2 * t + 1]);
      }
      if constexpr (!kShifted) fetch(turn + t + kAcrossStages);
    }
    // Of the rows' sums each group of lanes has one.
    constexpr int kLanes = kWarp / (2 * kTogether);
    const float sum = sum_one_of(sums, lane);
    const int row = aside + (turn + lane / (2 * kLanes)) * down;
    if (lane % kLanes == 0 && row < rows) {
      reinterpret_cast<float*>(warp_sums + row * warps + vector / kWarp)[lane / kLanes % 2] = sum;
    }
  }
  __syncthreads();
  if (a.wants_rows()) {
    for (int row = thread; row < rows; row += threads) {
      float2 sum = make_float2(0.f, 0.f);
      for (int warp = 0; warp < warps; ++warp) sum = plus(sum, warp_sums[row * warps + warp]);
      given.row_sums[int64_t(row) * gridDim.x + blockIdx.x] = sum;
    }
  }
  float* const scratch = reinterpret_cast<float*>(memory);  // rings are through
  write_columns_across<Y>(a, a.grad_weight, scratch, across, columns.weight);
  write_columns_across<Y>(a, a.grad_bias, scratch, across, columns.bias);
}

template <class X, class Y, bool kShifted>
__global__ void __launch_bounds__(kAcrossThreads, kShifted ? 1 : 2) norm_backward_across_rows(const AcrossNorm given) {
  using Row = AcrossRow<X, Y, kShifted, true>;
  constexpr int kSize = Row::kSize;
  extern __shared__ __align__(128) unsigned char memory[];
  const NormBackward& a = given.norm;
  const int n = int(a.n), rows = int(a.rows), thread = int(threadIdx.x), threads = int(blockDim.x), across = given.across;
  const int down = threads / across, lane = thread % kWarp, blocks = int(gridDim.x), parts = Row::parts(a);
  int vector = thread % across, aside = thread / across;
  make_ready(vector), make_ready(aside);
  const int column = (int(blockIdx.x) * across + vector) * kSize;
  const bool inside = column < n;
  uint4* const ring = reinterpret_cast<uint4*>(memory) + thread;
  float4* const terms = reinterpret_cast<float4*>(memory + Row::room(a, threads));
  const int turns = (rows + down - 1) / down;
  const auto place = [&](int turn) { return ring + turn % kAcrossStages * parts * threads; };
  const auto row_of = [&](int turn) { return aside + (turns - 1 - turn) * down; };
  const auto fetch = [&](int turn) {
    const int row = row_of(turn);
    if (inside && turn < turns && row < rows) Row::fetch(a, place(turn), threads, row * a.n + column);
    commit_copies();
  };

  if constexpr (!kShifted) {  // before the launch ahead has ended, which has waited for all others
#pragma unroll
    for (int turn = 0; turn < kAcrossStages; ++turn) fetch(turn);
  }
  float weight[kSize];
  weights_of_columns<Y, kShifted>(a, inside ? column : n, weight);
  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  wait_for_earlier();
  let_next_start();
#pragma unroll 1
  for (int row = thread / kWarp; row < rows; row += threads / kWarp) {
    RowTerms of_row;
    of_row.mean = a.mean ? a.mean[row] : 0.f, of_row.rstd = a.rstd[row];
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 4
    for (int i = lane; i < blocks; i += kWarp) sum = plus(sum, __ldcg(given.row_sums + int64_t(row) * blocks + i));
    sum = sum_of_lanes(sum, kWarp);
    of_row.set(a, a.mean, sum.x, sum.y);
    if (lane == 0) terms[row] = make_float4(of_row.scale, of_row.offset, of_row.slope, of_row.mean);
  }
  __syncthreads();

  float x_bias[kSize] = {};
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int row = row_of(turn);
    Row held;
    if constexpr (!kShifted) wait_for_oldest(kAcrossStages);
    if (row >= rows) {  // the same for all of a warp
      if constexpr (!kShifted) fetch(turn + kAcrossStages);
      continue;
    }
    if constexpr (kShifted) {
      held.load(a, row, column);
    } else {
      held.take(a, place(turn), threads);
    }
    const float4 kept = terms[row];
    RowTerms of_row;
    of_row.scale = kept.x, of_row.offset = kept.y, of_row.slope = kept.z, of_row.mean = kept.w;
    const int64_t base = row * a.n;
    float values[kSize], grad[kSize];
    held.values(a, row, column, of_row.mean, values, grad);
    second_pass<kSize, true>(values, weight, of_row, grad);
    if (a.grad_sum) {
      held.grad_sum.values(kShifted ? elements_into_vector(static_cast<const X*>(a.grad_sum) + base) : 0, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] += values[i];
    }
    if constexpr (!kShifted) {
      fetch(turn + kAcrossStages);
      if (!inside) continue;
    }
    if (a.grad_x) store_slot<X, kSize, kShifted>(static_cast<X*>(a.grad_x) + base, column, n, kWarp, grad);
    if (a.dropout.seed) {
      float multipliers[kSize];
      dropout_row<kSize, kShifted>(a.dropout, seed, base + column, multipliers);
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] *= multipliers[i];
    }
    if (a.grad_dropped) store_slot<Y, kSize, kShifted>(static_cast<Y*>(a.grad_dropped) + base, column, n, kWarp, grad);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x_bias[i] += column + i < n ? grad[i] : 0.f;
  }
  write_columns_across<Y>(a, a.grad_x_bias, reinterpret_cast<float*>(memory), across, x_bias);
}

}  // namespace fuseline
