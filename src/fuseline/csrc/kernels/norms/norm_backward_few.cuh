// The norms' backward for few rows: one launch, and all of the work on the chip at once.
//
// Moves: as norm_backward_rows.cuh, but for the partial sums, of which there are none where one cluster has all rows.
// Limit: latency. A second kernel for sums over rows costs as much as the first, 2 us and more.
//
// Threads: the blocks of a cluster divide the columns of all its rows between them, so that sums over rows stay in a
// block; what rows have to agree on goes round the cluster once, for all rows together. Each thread has one vector of
// columns and every stride-th row. It fetches all that it will read at once, into shared memory, and reads it there
// twice. While the rows' sums travel, those of columns are added up and written. More rows than a cluster holds have
// several, and a second kernel adds up what these leave.
#pragma once

#include "norm_backward_rows.cuh"
#include "device/ring.cuh"
#include "device/waiting.cuh"

namespace fuseline {

using norm_backward_plans::kFewThreads;

struct FewNorm {
  NormBackward norm;
  int width;     // vectors of a row that a block has
  int across;    // threads side by side in a row: a power of two in a warp, or whole warps
  int rows;      // of a cluster
  int clusters;  // with several of them sums are partial ones
  FewNormRoom room;  // of a block
};

// The elements of kSize of T that stand in vectors `step` apart.
template <class T, int kSize>
__device__ __forceinline__ void take_held(const uint4* at, int step, float (&values)[kSize]) {
  HeldSlot<T, kSize> slot;
#pragma unroll
  for (int v = 0; v < HeldSlot<T, kSize>::kVectors; ++v) slot.raw[v] = at[v * step];
  slot.values(values);
}

template <class X, class Y>
__global__ void __launch_bounds__(kFewThreads, 1) norm_backward_few(const FewNorm given) {
  constexpr int kSize = kVector<Y>, kXVectors = kSize / kVector<X>, kTogether = 4;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint64_t met;
  const NormBackward& a = given.norm;
  const int n = int(a.n), cluster = a.cluster, rank = int(blockIdx.x) & (cluster - 1), which = int(blockIdx.x) / cluster;
  const int thread = threadIdx.x, threads = blockDim.x, across = given.across, down = threads / across;
  const int vector = thread % across, aside = thread / across;
  const int column = (rank * given.width + vector) * kSize;
  const bool inside = vector < given.width && column < n;
  const int64_t first_row = int64_t(which) * given.rows;
  const int rows = int(min(a.rows - first_row, int64_t(given.rows)));
  const bool added = a.grad_sum, centred = a.mean, wants_rows = a.wants_rows();

  const FewNormRoom& room = given.room;
  uint4* const held = reinterpret_cast<uint4*>(memory) + thread;
  float4* const terms = reinterpret_cast<float4*>(memory + room.terms);
  float* const column_sums = reinterpret_cast<float*>(memory + room.columns);
  float2* const states = reinterpret_cast<float2*>(memory + room.states);  // of a row, from each block
  float2* const warp_sums = reinterpret_cast<float2*>(memory + room.sums);
  float2* const statistics = reinterpret_cast<float2*>(memory + room.statistics);
  const auto slot = [&](int turn, int part) { return held + (turn * room.parts + part) * threads; };

  let_next_start();
  if (thread == 0) barrier_init(&met, 1);
  publish_barriers();
  if (cluster > 1) cluster_arrive_relaxed();
  wait_for_earlier();
#pragma unroll 1
  for (int turn = 0; turn < room.turns; ++turn) {
    const int row = aside + turn * down;
    if (!inside || row >= rows) break;
    const int64_t at = (first_row + row) * n + column;
#pragma unroll
    for (int v = 0; v < kXVectors; ++v) {
      copy_async<16>(slot(turn, v), static_cast<const X*>(a.x) + at + v * kVector<X>, true);
      if (added) {
        copy_async<16>(slot(turn, kXVectors + 1 + v), static_cast<const X*>(a.grad_sum) + at + v * kVector<X>, true);
      }
    }
    copy_async<16>(slot(turn, kXVectors), static_cast<const Y*>(a.grad_y) + at, true);
  }
  commit_copies();
  float weight[kSize];
  weights_of_columns<Y, false>(a, inside ? column : n, weight);
  for (int row = thread; row < rows; row += threads) {
    statistics[row] = make_float2(centred ? a.mean[first_row + row] : 0.f, a.rstd[first_row + row]);
  }
  wait_for_all();
  __syncthreads();

  ColumnSums<kSize, 2> columns = {};
#pragma unroll 1
  for (int turn = 0; turn < room.turns; turn += kTogether) {
    float sums[2 * kTogether] = {};
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int row = aside + (turn + t) * down;
      if (!inside || row >= rows) continue;
      float values[kSize], grad[kSize];
      take_held<X>(slot(turn + t, 0), threads, values);
      take_held<Y>(slot(turn + t, kXVectors), threads, grad);
      const float2 of_row = statistics[row];
      first_pass<kSize, 2, true>(values, grad, weight, of_row.x, of_row.y, columns, sums[2 * t], sums[2 * t + 1]);
    }
    if (!wants_rows) continue;
    sum_in_warp(sums, min(across, kWarp));
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int row = aside + (turn + t) * down;
      if (row < rows && vector % kWarp == 0) {
        warp_sums[row * room.warps + vector / kWarp] = make_float2(sums[2 * t], sums[2 * t + 1]);
      }
    }
  }

  if (cluster > 1) cluster_wait();  // the others have begun
  if (wants_rows) {
    __syncthreads();
    if (cluster > 1 && thread == 0) barrier_expect(&met, rows * cluster * int(sizeof(float2)));
    for (int i = thread; i < rows * cluster; i += threads) {
      const int row = i / cluster, to = i % cluster;
      float2 sum = make_float2(0.f, 0.f);
      for (int warp = 0; warp < room.warps; ++warp) sum = plus(sum, warp_sums[row * room.warps + warp]);
      if (cluster > 1) {
        send_in_cluster(&states[row * cluster + rank], &met, to, sum);
      } else {
        states[row] = sum;
      }
    }
  }

  // Sums over the cluster's rows: in a warp first, where it has several, and over threads in fp64.
  const auto write_sums = [&](void* result, int kind, float(&mine)[kSize]) {
    if (!result) return;
    if (across < kWarp) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        for (int by = across; by < kWarp; by *= 2) mine[i] += from_lane(mine[i], by);
      }
    }
    const int step = across * kSize, count = across < kWarp ? threads / kWarp : down;
    const int part = across < kWarp ? thread / kWarp : aside;
    __syncthreads();
    if (across >= kWarp || thread % kWarp < across) {
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        *reinterpret_cast<float4*>(column_sums + part * step + vector * kSize + i) =
            make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
      }
    }
    __syncthreads();
    for (int c = thread; c < given.width * kSize; c += threads) {
      const int to = rank * given.width * kSize + c;
      if (to >= n) break;
      double sum = 0.0;
#pragma unroll 4
      for (int p = 0; p < count; ++p) sum += column_sums[p * step + c];
      if (given.clusters > 1) {
        a.partials[(int64_t(kind) * given.clusters + which) * a.columns + to] = float(sum);
      } else if (a.fp32_weights) {
        static_cast<float*>(result)[to] = float(sum);
      } else {
        static_cast<Y*>(result)[to] = from_float<Y>(float(sum));
      }
    }
  };
  write_sums(a.grad_weight, 0, columns.weight);
  write_sums(a.grad_bias, 1, columns.bias);
  if (!wants_rows) return;

  if (cluster > 1) {
    barrier_wait(&met, 0);
  } else {
    __syncthreads();
  }
  for (int row = thread; row < rows; row += threads) {
    float2 sum = make_float2(0.f, 0.f);
    for (int i = 0; i < cluster; ++i) sum = plus(sum, states[row * cluster + i]);
    RowTerms of_row;
    of_row.mean = statistics[row].x, of_row.rstd = statistics[row].y;
    of_row.set(a, centred, sum.x, sum.y);
    terms[row] = make_float4(of_row.scale, of_row.offset, of_row.slope, of_row.mean);
  }
  __syncthreads();
  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  float x_bias[kSize] = {};
#pragma unroll 1
  for (int turn = 0; turn < room.turns; ++turn) {
    const int row = aside + turn * down;
    if (!inside || row >= rows) break;
    const float4 kept = terms[row];
    RowTerms of_row;
    of_row.scale = kept.x, of_row.offset = kept.y, of_row.slope = kept.z, of_row.mean = kept.w;
    float values[kSize], grad[kSize];
    take_held<X>(slot(turn, 0), threads, values);
    take_held<Y>(slot(turn, kXVectors), threads, grad);
    second_pass<kSize, true>(values, weight, of_row, grad);
    if (added) {
      take_held<X>(slot(turn, kXVectors + 1), threads, values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] += values[i];
    }
    const int64_t base = (first_row + row) * n;
    if (a.grad_x) store_slot<X, kSize>(static_cast<X*>(a.grad_x) + base, column, n, grad);
    if (a.dropout.seed) {
      float multipliers[kSize];
      dropout_multipliers(a.dropout, seed, base + column, multipliers);
#pragma unroll
      for (int i = 0; i < kSize; ++i) grad[i] *= multipliers[i];
    }
    if (a.grad_dropped) store_slot<Y, kSize>(static_cast<Y*>(a.grad_dropped) + base, column, n, grad);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x_bias[i] += grad[i];
  }
  write_sums(a.grad_x_bias, 2, x_bias);
}

}  // namespace fuseline
