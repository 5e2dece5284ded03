// The host's half of the norms' forward of many rows at odd addresses (norm_forward_fetched.cuh), and their weights.
//
// A row begins at one of kVector elements of a vector. Weights are written so far into theirs once for each, 16 to 48 bytes an
// element, which the L2 keeps: a row's threads then take vectors of both, as those of rows that keep to 16-byte steps do.
#pragma once

#include "norm_forward_copied.cuh"

namespace fuseline {

struct OddWeights {
  const void* from[3];  // [n] each, or null
  uint4* to;            // [3][elements of a vector][vectors]
  int n, vectors;
};

template <class T>
__global__ void shift_weights(const OddWeights a) {
  let_next_start();
  wait_for_earlier();
  const int at = int(blockIdx.x * blockDim.x + threadIdx.x), vector = at % a.vectors;
  const int by = at / a.vectors % kVector<T>, kind = at / a.vectors / kVector<T>;
  const T* const from = static_cast<const T*>(kind == 0 ? a.from[0] : kind == 1 ? a.from[1] : a.from[2]);
  if (kind > 2 || !from) return;
  a.to[(kind * kVector<T> + by) * a.vectors + vector] = load_vector<T, false>(from, vector * kVector<T> - by, a.n, false);
}

// Vectors that a row of n elements stands in, at most.
template <class T>
int64_t odd_vectors(int64_t n) {
  return divide_up(n + kVector<T> - 1, kVector<T>);
}

template <class T, bool kAdded, bool kMasked>
bool run_odd(NormForward a, const RowChoice& requested, void* workspace, const Device& device, void* stream, int& error) {
  constexpr int kTensors = kAdded ? 2 : 1;
  const void* const first = kAdded ? a.residual : a.x;
  const auto alike = [&](uintptr_t line) {
    bool all = true;
    for (const void* tensor : {a.x, static_cast<const void*>(a.y), kAdded ? static_cast<const void*>(a.sum) : a.x}) {
      all = all && (reinterpret_cast<uintptr_t>(tensor) - reinterpret_cast<uintptr_t>(first)) % line == 0;
    }
    return all;
  };
  if (!alike(16) || (a.dropout.seed && offset_in_vector(first) != 0)) return false;
  if (sizeof(T) == 2 && a.fp32_weights && (a.weight || a.bias || a.x_bias)) return false;
  const Lines lines{alike(128) ? 128 : 16, false};
  const int64_t vectors = vectors_of(sizeof(T), a.n, lines);
  constexpr int kMostWarps = (kMasked ? kMaskedThreads : kMostThreads) / kWarp;
  const FetchedPlan plan = plan_requested(requested, vectors, kTensors, sizeof(T) == 2 && !kAdded, false, kMostWarps, device);
  if (plan.warps == 0) return false;
  auto kernel = norm_forward_fetched<T, kAdded, false, kMasked, true>;
  if constexpr (sizeof(T) == 2 && !kAdded) {
    if (plan.light) kernel = norm_forward_fetched<T, false, true, false, true>;
  }
  int count = 0;
  cudaError_t failed = cudaSuccess;
  if (plan.cluster > kMaxCluster) failed = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (failed == cudaSuccess) {
    failed = resident_clusters(kernel, device, plan.warps * kWarp, plan.bytes, plan.cluster, count);
  }
  if (failed != cudaSuccess || count == 0) return cudaGetLastError(), false;  // it grants no such clusters
  const int each = int(odd_vectors<T>(a.n));
  const OddWeights weights{{a.weight, a.bias, kMasked ? a.x_bias : nullptr}, static_cast<uint4*>(workspace), int(a.n), each};
  if (a.weight || a.bias || (kMasked && a.x_bias)) {
    constexpr int kThreads = 256;
    const int64_t kinds = kMasked ? 3 : 2;
    const int64_t grid = divide_up(kinds * kVector<T> * each, kThreads);
    error = launch(shift_weights<T>, weights, grid, dim3(kThreads), 0, 1, stream, true);
    if (error) return true;
  }
  a.cluster = plan.cluster;
  const FetchedNorm given{a, plan.part, plan.leaves, 0, lines.bytes, each, weights.to};
  error = launch(kernel, given, a.rows * plan.cluster, dim3(plan.warps * kWarp), plan.bytes, plan.cluster, stream, true);
  return true;
}

}  // namespace fuseline
