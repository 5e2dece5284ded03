// The norms' forward for short rows that do not keep to 16-byte steps: the same results as in norm_forward_rows.cuh.
//
// Moves: as there; limit: HBM bandwidth, and shared memory at about 7 accesses an element. Threads: one for each row. The
// rows of a block are one stretch of memory, whole but for its ends in 16-byte vectors: it goes through shared memory,
// and no thread meets another's edge.
#pragma once

#include "norm_elements.cuh"

namespace fuseline {

constexpr int kShortRow = 64;       // elements at most
constexpr int kShortRowsOfBlock = 128;
constexpr int kShortShared = 47 * 1024;

// Copies `count` elements at `from` to shared memory, where they begin as far into a vector as `from` is.
template <class T>
__device__ __forceinline__ T* take_stretch(uint4* to, const T* from, int count) {
  constexpr int kSize = kVector<T>;
  const int by = elements_into_vector(from);
  const int vectors = (count + by + kSize - 1) / kSize;
  for (int v = int(threadIdx.x); v < vectors; v += int(blockDim.x)) {
    const int first = v * kSize - by;
    to[v] = load_vector<T, false>(from, first, count, true);
  }
  return reinterpret_cast<T*>(to) + by;
}

// And back. The stretch in shared memory begins as far into a vector as `to` is.
template <class T>
__device__ __forceinline__ void give_stretch(const uint4* from, T* to, int count) {
  constexpr int kSize = kVector<T>;
  const int by = elements_into_vector(to);
  const int vectors = (count + by + kSize - 1) / kSize;
  for (int v = int(threadIdx.x); v < vectors; v += int(blockDim.x)) {
    float values[kSize];
    unpack<T>(from[v], values);
    store_vector<T, false>(to, v * kSize - by, count, true, values);
  }
}

// Bytes of a stretch of `count` elements.
template <class T>
__host__ __device__ inline int stretch_bytes(int count) {
  return (count * int(sizeof(T)) + 15) / 16 * 16 + 16;
}

// Shared memory of a block of `rows` rows: what is normalized, the sum (its own), y, the branch, and three weights.
template <class X, class Y, bool kAdded>
inline int short_bytes(int rows, int n) {
  const int count = rows * n;
  return stretch_bytes<X>(count) * (kAdded ? 2 : 1) + stretch_bytes<Y>(count) * (kAdded ? 2 : 1) + 3 * n * 4;
}

template <class X, class Y, bool kAdded>
__global__ void __launch_bounds__(kShortRowsOfBlock) norm_forward_short(const NormForward a) {
  extern __shared__ uint4 room[];
  let_next_start();
  wait_for_earlier();
  const int n = int(a.n), t = int(threadIdx.x);
  const int64_t first_row = int64_t(blockIdx.x) * blockDim.x;
  const int rows = int(min(int64_t(blockDim.x), a.rows - first_row)), count = rows * n;
  const int64_t at = first_row * n;
  const int x_vectors = stretch_bytes<X>(int(blockDim.x) * n) / 16, y_vectors = stretch_bytes<Y>(int(blockDim.x) * n) / 16;
  uint4* const y_room = room + x_vectors;
  uint4* const sum_room = y_room + y_vectors;
  uint4* const branch_room = sum_room + (kAdded ? x_vectors : 0);
  float* const weight = reinterpret_cast<float*>(branch_room + (kAdded ? y_vectors : 0));
  float* const bias = weight + n;
  float* const x_bias = bias + n;
  const auto weight_at = [&](const void* weights, int c) {
    return a.fp32_weights ? static_cast<const float*>(weights)[c] : to_float(static_cast<const Y*>(weights)[c]);
  };
  for (int c = t; c < n; c += int(blockDim.x)) {
    weight[c] = a.weight ? weight_at(a.weight, c) : 1.f;
    bias[c] = a.bias ? weight_at(a.bias, c) : 0.f;
    x_bias[c] = kAdded && a.x_bias ? weight_at(a.x_bias, c) : 0.f;
  }
  const X* values = take_stretch(room, static_cast<const X*>(kAdded ? a.residual : a.x) + at, count) + t * n;
  const Y* branch = nullptr;
  if constexpr (kAdded) branch = take_stretch(branch_room, static_cast<const Y*>(a.x) + at, count) + t * n;
  __syncthreads();
  if (t < rows) {
    if constexpr (kAdded) {
      X* const sum = reinterpret_cast<X*>(sum_room) + elements_into_vector(static_cast<X*>(a.sum) + at) + t * n;
      const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
      const int64_t begin = at + int64_t(t) * n;
      for (int c = 0; c < n; ++c) {
        float value = to_float(branch[c]) + x_bias[c];
        if (a.dropout.seed) value *= dropout_multiplier(a.dropout, seed, begin + c);
        sum[c] = from_float<X>(to_float(values[c]) + value);
      }
      values = sum;
    }
    float mean = 0.f;
    if (a.centred) {
      for (int c = 0; c < n; ++c) mean += to_float(values[c]);
      mean /= float(n);
    }
    float distances = 0.f, squares = 0.f;
    for (int c = 0; c < n; ++c) {
      const float apart = to_float(values[c]) - mean;
      distances += apart;
      squares += apart * apart;
    }
    const Moments whole = a.centred ? corrected(mean, distances, squares, float(n)) : Moments{0.f, squares, float(n), 0.f};
    const float rstd = rstd_of(a, whole);
    keep_statistics(a, first_row + t, whole.mean, rstd);
    Y* const y = reinterpret_cast<Y*>(y_room) + elements_into_vector(static_cast<Y*>(a.y) + at) + t * n;
    for (int c = 0; c < n; ++c) {
      y[c] = from_float<Y>((to_float(values[c]) - whole.mean) * rstd * weight[c] + bias[c]);
    }
  }
  __syncthreads();
  give_stretch(y_room, static_cast<Y*>(a.y) + at, count);
  if constexpr (kAdded) give_stretch(sum_room, static_cast<X*>(a.sum) + at, count);
}

}  // namespace fuseline
