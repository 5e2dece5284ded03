// What the kernels of linear_gemv.cu and linear_gemv_team.cuh share: x in shared memory, and what becomes of a sum.
#pragma once

#include "linear_call.cuh"

namespace fuseline {

// x of all rows to shared memory, [m][k], normed over k if the call says so.
template <class T, int M>
__device__ __forceinline__ void fetch_normed(const LinearArguments& a, uint4* to, float* room) {
  const int thread = threadIdx.x, vectors = a.k / 8;
  const auto sum_of_block = [&](float value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();
    if (thread % kWarp == 0) room[thread / kWarp] = value;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kLinearWarps; ++w) sum += room[w];
    return sum;
  };
#pragma unroll 1
  for (int row = 0; row < M; ++row) {
    uint4* const mine = to + row * vectors;  // each thread norms what it has fetched
    float sum = 0.f, squares = 0.f;
    constexpr int kTogether = 4;
    for (int begin = thread; begin < vectors; begin += kTogether * kLinearThreads) {
      uint4 raw[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int i = begin + u * kLinearThreads;
        raw[u] = make_uint4(0, 0, 0, 0);
        if (row < a.m && i < vectors) raw[u] = *reinterpret_cast<const uint4*>(a.x + row * a.x_stride + int64_t(i) * 16);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int i = begin + u * kLinearThreads;
        if (i < vectors) mine[i] = raw[u];
        if (i >= vectors || a.norm == FUSELINE_NORM_NONE) continue;  // sums take longer than the copy
        float values[8];
        unpack<T>(raw[u], values);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += values[e], squares = fmaf(values[e], values[e], squares);
      }
    }
    if (a.norm == FUSELINE_NORM_NONE || row >= a.m) continue;
    float mean = 0.f;
    if (a.norm == FUSELINE_NORM_LAYER) {
      mean = sum_of_block(sum) / a.k;
      squares = 0.f;
      for (int i = thread; i < vectors; i += kLinearThreads) {
        float values[8];
        unpack<T>(mine[i], values);
#pragma unroll
        for (int e = 0; e < 8; ++e) squares = fmaf(values[e] - mean, values[e] - mean, squares);
      }
    }
    const float rstd = rsqrtf(sum_of_block(squares) / a.k + a.eps);
    for (int i = thread; i < vectors; i += kLinearThreads) {
      float values[8], weight[8], shift[8] = {};
      unpack<T>(mine[i], values);
      unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_weight) + i), weight);
      if (a.norm_bias) unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_bias) + i), shift);
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = fmaf((values[e] - mean) * rstd, weight[e], shift[e]);
      mine[i] = pack<T>(values);
    }
  }
  __syncthreads();
}

// The warps of a team; a barrier's number in a register would take all sixteen.
template <int kTeamWarps>
__device__ __forceinline__ void meet_team(int team) {
  constexpr int kThreads = kTeamWarps * kWarp;
  static_assert(kTeamWarps == 1 || 4 * kThreads >= kLinearThreads);
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else if constexpr (kThreads == kLinearThreads) {
    __syncthreads();
  } else if (team == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  } else if (team == 1) {
    asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
  } else if (team == 2) {
    asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory");
  } else {
    asm volatile("bar.sync 4, %0;" ::"n"(kThreads) : "memory");
  }
}

// One output: what stands around the product.
template <class T>
__device__ __forceinline__ void write_output(const LinearArguments& a, float sum, float other, int m, int row, int halves) {
  const T* const bias = reinterpret_cast<const T*>(a.bias);
  if (bias) sum += to_float(bias[row]);
  sum = activated<T>(a, sum, bias && halves ? other + to_float(bias[row + halves]) : other);
  const int64_t to = int64_t(m) * (halves ? halves : a.n) + row;
  if (a.residual) sum += to_float(reinterpret_cast<const T*>(a.residual)[to]);
  reinterpret_cast<T*>(a.y)[to] = from_float<T>(sum);
}

}  // namespace fuseline
