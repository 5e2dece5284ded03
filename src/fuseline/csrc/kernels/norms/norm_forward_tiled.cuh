// The norms' forward for short rows that do not keep to 16-byte steps: the same results as in norm_forward_rows.cuh, for
// x of y's dtype, or for sum = residual + x, which is returned, too (sm_90).
//
// Moves: as there; limit: HBM bandwidth. Threads: as many rows as make whole vectors come to a block in one bulk copy and
// leave it in another (tiled.cuh). Of each a part of a warp has single elements, kEach a thread, of the same columns row
// after row, and keeps their weights.
#pragma once

#include "kept.cuh"
#include "norm_row.cuh"
#include "device/tiled.cuh"

namespace fuseline {

struct TiledNorm {
  NormForward norm;
  int rows;  // of a block
};

template <class T, int kEach, bool kAdded, bool kMasked = false>
__global__ void __launch_bounds__(kTileBlock, 4) norm_forward_tiled(const TiledNorm given) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t arrived;
  const NormForward& a = given.norm;
  Group<Moments, true> group(nullptr, 1);
  const int n = int(a.n);
  const int64_t first = int64_t(blockIdx.x) * given.rows;
  const int rows = int(min(a.rows - first, int64_t(given.rows)));
  // What is normalized, and the branch, whose place y takes.
  const Tile<T> tile(ring, rows, n);
  const int vectors = (given.rows * n + kVector<T> - 1) / kVector<T>;
  const Tile<T> branch(ring + (kAdded ? vectors : 0), rows, n);
  // What a dropout keeps of each eight elements, as many as words of 16 bits come at once: blocks begin at such eights.
  [[maybe_unused]] uint8_t* const kept = reinterpret_cast<uint8_t*>(ring + 2 * vectors);
  let_next_start();
  if (threadIdx.x + threadIdx.y == 0) barrier_init(&arrived, kAdded ? 2 : 1), publish_barriers();
  __syncthreads();
  wait_for_earlier();
  tile.fetch(static_cast<const T*>(kAdded ? a.residual : a.x) + first * n, &arrived);
  if (kAdded) branch.fetch(static_cast<const T*>(a.x) + first * n, &arrived);
  float weight[kEach], bias[kEach], x_bias[kMasked ? kEach : 1];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = group.lane + k * group.threads;
    weight[k] = a.weight && i < n ? weight_at<T>(a.weight, a.fp32_weights, i) : 1.f;
    bias[k] = a.bias && i < n ? weight_at<T>(a.bias, a.fp32_weights, i) : 0.f;
    if constexpr (kMasked) x_bias[k] = a.x_bias && i < n ? weight_at<T>(a.x_bias, a.fp32_weights, i) : 0.f;
  }
  [[maybe_unused]] const float scale = kMasked && a.dropout.seed ? a.dropout.scale : 1.f;
  if constexpr (kMasked) {
    const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
    for (int eight = int(threadIdx.y * blockDim.x + threadIdx.x); eight * 8 < rows * n; eight += kTileBlock) {
      kept[eight] = a.dropout.seed ? kept_of<8>(a.dropout, seed, first * n + eight * 8) : 255;
    }
  }
  const float inverse = 1.f / float(n);
  __syncthreads();
  barrier_wait(&arrived, 0);
#pragma unroll 1
  for (int at = threadIdx.y; at < given.rows; at += blockDim.y) {
    T* const row = tile.shared + at * n;
    T* const y = branch.shared + at * n;
    const int inside = at < rows ? n : 0;
    float values[kEach][1];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = group.lane + k * group.threads;
      values[k][0] = 0.f;
      if (i >= inside) continue;
      values[k][0] = to_float(row[i]);
      if constexpr (kAdded) {
        float added = to_float(y[i]);
        if constexpr (kMasked) {
          const int element = at * n + i;
          row[i] = from_float<T>(fmaf(added + x_bias[k], kept[element / 8] >> element % 8 & 1 ? scale : 0.f, values[k][0]));
        } else {
          row[i] = from_float<T>(values[k][0] + added);
        }
        values[k][0] = to_float(row[i]);
      }
    }
    const auto has = [&](int k) { return group.lane + k * group.threads < inside; };
    const auto has_part = [](int, int) { return false; };
    const auto sum = [&](auto value) { return group.warp_sum(value); };
    const auto first_of = [&](float value) { return __shfl_sync(kAllLanes, value, 0, group.width); };
    const Moments whole =
        sizeof(T) == 4 ? moments_of<T>(values, float(n), inverse, a.centred, has, has_part, sum)
                       : moments_near<T>(values, float(n), inverse, a.centred, has, has_part, sum, first_of);
    const float rstd = rstd_of<T>(whole.squares, inverse, a.eps);
    if (group.lane == 0 && at < rows) keep_statistics(a, first + at, whole.mean, rstd);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = group.lane + k * group.threads;
      if (i < inside) y[i] = from_float<T>(fmaf((values[k][0] - whole.mean) * rstd, weight[k], bias[k]));
    }
  }
  show_to_copies();
  __syncthreads();
  if (kAdded) tile.send(static_cast<T*>(a.sum) + first * n);
  branch.send(static_cast<T*>(a.y) + first * n);
#endif
}

}  // namespace fuseline
