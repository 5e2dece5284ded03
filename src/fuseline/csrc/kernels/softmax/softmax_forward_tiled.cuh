// Softmax of rows without a mask that pass through shared memory with their neighbours (tiled.cuh).
#pragma once

#include "softmax.cuh"
#include "device/tiled.cuh"

namespace fuseline {

// Short rows without a mask that do not keep to 16-byte steps.
template <class T, int kEach>
__global__ void __launch_bounds__(kTileBlock, kEach == kFewTiled ? 6 : 3) softmax_forward_tiled(const SoftmaxForward a) {
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t arrived;
  Group<MaxSum<T>, true> group(nullptr, 1);
  const int n = int(a.n);
  const int64_t first = int64_t(blockIdx.x) * a.part;
  const int rows = int(min(a.rows - first, int64_t(a.part)));
  const Tile<T> tile(ring, rows, n);
  tile.bring(static_cast<const T*>(a.x) + first * n, &arrived);
#pragma unroll 1
  for (int at = threadIdx.y; at < a.part; at += blockDim.y) {
    T* const row = tile.shared + at * n;
    const int inside = at < rows ? n : 0;
    float score[kEach];
    float max = -kInfinity;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = group.lane + k * group.threads;
      score[k] = i < inside ? to_float(row[i]) * a.scale : -kInfinity;
      max = fmaxf(max, score[k]);
    }
    const float taken_out = finite(group.warp_max(max));
    Total<T> sum = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      score[k] = exponential<T>(score[k] - taken_out);
      sum += score[k];
    }
    const Share share = divide(1.f, group.warp_sum(sum));
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = group.lane + k * group.threads;
      if (i < inside) row[i] = from_float<T>(times<T>(score[k], share));
    }
  }
  show_to_copies();
  __syncthreads();
  tile.send(static_cast<T*>(a.y) + first * n);
}

// Rows of a warp that keep to 16-byte steps, but not to lines of the cache.
template <class T, int kHeld>
__global__ void __launch_bounds__(kTileBlock, 4) softmax_forward_tiled_vectors(const SoftmaxForward a) {
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t arrived;
  constexpr int kSize = kVector<T>;
  Group<MaxSum<T>, true> group(nullptr, 1);
  const int n = int(a.n), vectors = n / kSize;
  const int64_t first = int64_t(blockIdx.x) * a.part;
  const int rows = int(min(a.rows - first, int64_t(a.part)));
  const Tile<T> tile(ring, rows, n);
  tile.bring(static_cast<const T*>(a.x) + first * n, &arrived);
#pragma unroll 1
  for (int at = threadIdx.y; at < rows; at += blockDim.y) {
    uint4* const row = ring + at * vectors;
    float score[kHeld][kSize];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = group.lane + k * kWarp;
      unpack<T>(slot < vectors ? row[slot] : make_uint4(0, 0, 0, 0), score[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) score[k][i] = slot < vectors ? score[k][i] * a.scale : -kInfinity;
    }
    share_out<T>(group, score);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = group.lane + k * kWarp;
      if (slot < vectors) row[slot] = pack<T>(score[k]);
    }
  }
  show_to_copies();
  __syncthreads();
  tile.send(static_cast<T*>(a.y) + first * n);
}

}  // namespace fuseline
