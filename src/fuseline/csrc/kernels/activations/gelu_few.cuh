// The gradients of gelu and of its bias for few rows, in one launch: blocks have columns and all rows of them, so that
// nobody waits for another's sums or leaves them to a second kernel.
//
// Moves: x and grad_out read once, grad_x written once. Limit: latency.
//
// Threads: a block has `across` accesses side by side, and its threads every so-manieth row, kFewRows of them in flight.
// Rows of a warp are added up in it, then those of the warps in shared memory: always in the same order.
#pragma once

#include "plans/gelu.h"
#include "device/elementwise.cuh"

namespace fuseline {

using namespace gelu_plans;

struct FewBiasGradients {
  const void* grad_out;
  const void* x;
  const void* bias;
  void* grad_x;     // null if not wanted
  void* grad_bias;
  int64_t rows, n;
  int across;       // accesses of a block along a row, a power of two in a warp
  bool fp32_bias, bias_vectors;
};

template <class Activation, class T>
__global__ void __launch_bounds__(kFewThreads, kFewBlocks) gelu_bias_gradients_few(const FewBiasGradients a) {
  constexpr int kSize = kVector<T>;
  __shared__ __align__(16) float parts[kFewThreads / kWarp][kWarp * kSize];
  let_next_start();
  const int across = a.across, down = int(blockDim.x) / across;
  const int vector = int(threadIdx.x) % across, aside = int(threadIdx.x) / across;
  const int n = int(a.n), rows = int(a.rows), column = (int(blockIdx.x) * across + vector) * kSize;
  const bool mine = column < n;
  int64_t at = int64_t(aside) * a.n + column;
  const int64_t step = int64_t(down) * a.n;
  make_ready(at);
  wait_for_earlier();
  const T* grad_out = static_cast<const T*>(a.grad_out);
  const T* x = static_cast<const T*>(a.x);
  T* grad_x = static_cast<T*>(a.grad_x);

  Raw<T, kSize> raw[kFewRows][2];
  const auto load = [&](int row) {
#pragma unroll
    for (int u = 0; u < kFewRows; ++u) {
      if (!mine || row + u * down >= rows) continue;
      raw[u][0] = load_wide<T, kSize>(grad_out + at + u * step);
      raw[u][1] = load_wide<T, kSize>(x + at + u * step);
    }
  };
  load(aside);
  float bias[kSize], sums[kSize] = {};
  load_repeated<T, kSize>(a.bias, a.fp32_bias, a.bias_vectors, mine ? column : 0, a.n, bias);
#pragma unroll 1
  for (int row = aside; row < rows; row += down * kFewRows) {
#pragma unroll
    for (int u = 0; u < kFewRows; ++u) {
      if (!mine || row + u * down >= rows) continue;
      float grad[kSize], value[kSize];
      widen<T, kSize>(raw[u][0], grad);
      widen<T, kSize>(raw[u][1], value);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        grad[i] *= Activation::both(value[i] + bias[i]).y;
        sums[i] += grad[i];
      }
      if (a.grad_x) store_wide<T, kSize>(grad_x + at + u * step, grad);
    }
    at += kFewRows * step;
    load(row + down * kFewRows);
  }

  // Rows of a warp are added up in it, then those of the warps.
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp, warps = int(blockDim.x) / kWarp;
  for (int by = across; by < kWarp; by *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], by);
  }
  if (lane < across) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      *reinterpret_cast<float4*>(&parts[warp][lane * kSize + i]) =
          make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }
  }
  __syncthreads();
  const int width = across * kSize;
  for (int c = int(threadIdx.x); c < width; c += int(blockDim.x)) {
    const int of_row = int(blockIdx.x) * width + c;
    if (of_row >= n) return;
    float sum = 0.f;
    for (int w = 0; w < warps; ++w) sum += parts[w][c];
    if (a.fp32_bias) {
      static_cast<float*>(a.grad_bias)[of_row] = sum;
    } else {
      static_cast<T*>(a.grad_bias)[of_row] = from_float<T>(sum);
    }
  }
}

}  // namespace fuseline
