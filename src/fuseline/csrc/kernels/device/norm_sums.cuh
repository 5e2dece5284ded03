// What the norms' backward does beside its main kernel: adding up partial sums, and rows that are too long for that
// kernel. Those take one kernel for the gradients of rows (a block a row, read twice) and one for the partial sums (a
// thread a column): the inputs move three times instead of once.
#pragma once

#include "norm.cuh"
#include "overlap.cuh"

namespace fuseline {

constexpr int kLongBlock = 512;

template <class T>
__device__ __forceinline__ float weight_at(const NormBackward& a, int64_t c) {
  if (!a.weight) return 1.f;
  return a.fp32_weights ? static_cast<const float*>(a.weight)[c] : to_float(static_cast<const T*>(a.weight)[c]);
}

// Gradients of rows that are too long for the ring.
template <class X, class Y>
__global__ void __launch_bounds__(kLongBlock) norm_backward_long(const NormBackward a) {
  __shared__ float2 shared[2 * kMaxStates];
  Group<float2> group(shared, 1);
  const int64_t row = blockIdx.x;
  const X* x = static_cast<const X*>(a.x) + row * a.n;
  const Y* grad_y = static_cast<const Y*>(a.grad_y) + row * a.n;
  const X* grad_sum = a.grad_sum ? static_cast<const X*>(a.grad_sum) + row * a.n : nullptr;
  X* grad_x = a.grad_x ? static_cast<X*>(a.grad_x) + row * a.n : nullptr;
  Y* grad_dropped = a.grad_dropped ? static_cast<Y*>(a.grad_dropped) + row * a.n : nullptr;
  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const float mean = a.mean ? a.mean[row] : 0.f, rstd = a.rstd[row];
  float2 sums = make_float2(0.f, 0.f);
#pragma unroll 4
  for (int64_t c = group.lane; c < a.n; c += group.threads) {
    const float weighted = to_float(grad_y[c]) * weight_at<Y>(a, c);
    sums.x += weighted;
    sums.y += weighted * ((to_float(x[c]) - mean) * rstd);
  }
  sums = sum_over_row(sums, group);
  const float offset = a.mean ? rstd * (sums.x / float(a.n)) : 0.f, slope = rstd * rstd * (sums.y / float(a.n));
#pragma unroll 4
  for (int64_t c = group.lane; c < a.n; c += group.threads) {
    const float weighted = to_float(grad_y[c]) * weight_at<Y>(a, c);
    float grad = weighted * rstd - offset - (to_float(x[c]) - mean) * slope;
    if (grad_sum) grad += to_float(grad_sum[c]);
    if (grad_x) grad_x[c] = from_float<X>(grad);
    if (!grad_dropped) continue;
    const float kept = a.dropout.seed ? dropout_multiplier(a.dropout, seed, row * a.n + c) : 1.f;
    grad_dropped[c] = from_float<Y>(grad * kept);
  }
}

// Partial sums of such rows: blockIdx.y is a share of the rows, and each thread has a column. The bias before the
// dropout has the sums of what the kernel before wrote.
template <class X, class Y>
__global__ void __launch_bounds__(kLongBlock) norm_partials_long(const NormBackward a) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= a.n) return;
  const bool from_dropped = a.dropout.seed || !a.grad_x;
  float weight_sum = 0.f, bias_sum = 0.f, x_bias_sum = 0.f;
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const int64_t at = row * a.n + c;
    const float grad = to_float(static_cast<const Y*>(a.grad_y)[at]);
    const float mean = a.mean ? a.mean[row] : 0.f;
    weight_sum += grad * ((to_float(static_cast<const X*>(a.x)[at]) - mean) * a.rstd[row]);
    bias_sum += grad;
    if (a.grad_x_bias) {
      x_bias_sum += from_dropped ? to_float(static_cast<const Y*>(a.grad_dropped)[at])
                                 : to_float(static_cast<const X*>(a.grad_x)[at]);
    }
  }
  float* const mine = a.partials + blockIdx.y * a.columns + c;
  const int64_t kind_step = gridDim.y * a.columns;
  mine[0] = weight_sum;
  if (a.grad_bias || a.grad_x_bias) mine[kind_step] = bias_sum;
  if (a.grad_x_bias) mine[2 * kind_step] = x_bias_sum;
}

// Adds up `count` partial sums of each column, in fp64: blockIdx.y 0 for weight, 1 for bias, 2 for the bias before the
// dropout. A lane has kWide columns, and the warps of a block share the partial sums of them.
template <class T, int kWide>
__global__ void __launch_bounds__(1024) norm_add_partials(const NormBackward a, int count) {
  constexpr int kColumns = kWarp * kWide;  // of a block
  __shared__ double shared[kWarp][kColumns];
  void* const result = blockIdx.y == 0 ? a.grad_weight : blockIdx.y == 1 ? a.grad_bias : a.grad_x_bias;
  let_next_start();
  wait_for_earlier();
  if (!result) return;
  const int64_t from = int64_t(blockIdx.x) * kColumns;
  const int64_t c = from + threadIdx.x * kWide;
  const float* partials = a.partials + int64_t(blockIdx.y) * count * a.columns + c;
  double sums[kWide] = {};
  if (c < a.n) {
#pragma unroll 4
    for (int p = threadIdx.y; p < count; p += blockDim.y) {
      if constexpr (kWide == 4) {
        const float4 part = *reinterpret_cast<const float4*>(partials + int64_t(p) * a.columns);
        sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
      } else {
        sums[0] += partials[int64_t(p) * a.columns];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) shared[threadIdx.y][threadIdx.x * kWide + i] = sums[i];
  __syncthreads();
  const int column = int(threadIdx.y) * kWarp + int(threadIdx.x);
  if (column >= kColumns || from + column >= a.n) return;
  double sum = 0.0;
#pragma unroll 4
  for (int part = 0; part < int(blockDim.y); ++part) sum += shared[part][column];
  if (a.fp32_weights) {
    static_cast<float*>(result)[from + column] = float(sum);
  } else {
    static_cast<T*>(result)[from + column] = from_float<T>(float(sum));
  }
}

// Launches it so that its blocks may come up while the kernel before, on the same stream, is at its end.
template <class T>
int add_partials(const NormBackward& a, int sums, int count, bool early, void* stream) {
  constexpr int64_t kLongRow = 4096;  // from which there are blocks enough for four columns a lane
  const bool wide = a.n >= kLongRow;
  const int most = power_of_two_from(divide_up(count, 4));  // four partial sums a warp are all on their way at once
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(divide_up(a.n, kWarp * (wide ? 4 : 1))), unsigned(sums));
  config.blockDim = dim3(kWarp, unsigned(std::clamp(most, 4, kWarp)));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const auto kernel = wide ? norm_add_partials<T, 4> : norm_add_partials<T, 1>;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a, count);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
