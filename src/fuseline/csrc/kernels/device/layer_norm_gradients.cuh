// What the backward of the layer norm does beside its main kernel: adding up partial sums, and rows that are too long
// for that kernel. Those take one kernel for grad_x (a block a row, read twice) and one for the partial sums (a thread
// a column): x and grad_out move three times instead of once.
#pragma once

#include "group.cuh"
#include "weights.cuh"

namespace fuseline {

struct LayerNormBackward {
  const void* grad_out;
  const void* x;
  const void* weight;
  const float* mean;
  const float* rstd;
  void* grad_x;
  void* grad_weight;
  void* grad_bias;
  float* partials;  // [2, blocks that share no columns, n]: for weight, for bias; null if neither is wanted
  int64_t rows, n;
  bool fp32_weights;
  int stages;
  int cluster;
};

constexpr int kLongBlock = 512;

// grad_x of rows that are too long for the ring.
template <class T>
__global__ void __launch_bounds__(kLongBlock) layer_norm_backward_long(const LayerNormBackward a) {
  __shared__ float2 shared[2 * kMaxStates];
  Group<float2> group(shared, 1);
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  const T* grad_out = static_cast<const T*>(a.grad_out) + row * a.n;
  T* grad_x = static_cast<T*>(a.grad_x) + row * a.n;
  const float mean = a.mean[row], rstd = a.rstd[row];
  float2 sums = make_float2(0.f, 0.f);
#pragma unroll 4
  for (int64_t c = group.lane; c < a.n; c += group.threads) {
    float weight[1] = {1.f};
    if (a.weight) load_weights<T, false>(a.weight, a.fp32_weights, c, a.n, weight);
    const float weighted = to_float(grad_out[c]) * weight[0];
    sums.x += weighted;
    sums.y += weighted * ((to_float(x[c]) - mean) * rstd);
  }
  sums = sum_over_row(sums, group);
  const float offset = sums.x / float(a.n), slope = sums.y / float(a.n);
#pragma unroll 4
  for (int64_t c = group.lane; c < a.n; c += group.threads) {
    float weight[1] = {1.f};
    if (a.weight) load_weights<T, false>(a.weight, a.fp32_weights, c, a.n, weight);
    const float x_hat = (to_float(x[c]) - mean) * rstd;
    grad_x[c] = from_float<T>((to_float(grad_out[c]) * weight[0] - offset - x_hat * slope) * rstd);
  }
}

// Partial sums of such rows: blockIdx.y is a share of the rows, and each thread has a column.
template <class T>
__global__ void __launch_bounds__(kLongBlock) layer_norm_partials_long(const LayerNormBackward a) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= a.n) return;
  float weight_sum = 0.f, bias_sum = 0.f;
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float grad = to_float(static_cast<const T*>(a.grad_out)[row * a.n + c]);
    const float x_hat = (to_float(static_cast<const T*>(a.x)[row * a.n + c]) - a.mean[row]) * a.rstd[row];
    weight_sum += grad * x_hat;
    bias_sum += grad;
  }
  a.partials[blockIdx.y * a.n + c] = weight_sum;
  a.partials[(gridDim.y + blockIdx.y) * a.n + c] = bias_sum;
}

// Adds up `count` partial sums of each column: blockIdx.y 0 for weight, 1 for bias. A block has 32 columns, and its 32
// warps share the partial sums of them.
template <class T>
__global__ void __launch_bounds__(1024) layer_norm_add_partials(const LayerNormBackward a, int count) {
  __shared__ float shared[kWarp][kWarp + 1];
  void* const result = blockIdx.y == 0 ? a.grad_weight : a.grad_bias;
  if (!result) return;
  const int64_t c = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  const float* partials = a.partials + int64_t(blockIdx.y) * count * a.n;
  float sum = 0.f;
  if (c < a.n) {
#pragma unroll 4
    for (int p = threadIdx.y; p < count; p += kWarp) sum += partials[int64_t(p) * a.n + c];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = shared[threadIdx.x][threadIdx.y];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const int64_t column = int64_t(blockIdx.x) * kWarp + threadIdx.y;
  if (threadIdx.x != 0 || column >= a.n) return;
  if (a.fp32_weights) {
    static_cast<float*>(result)[column] = sum;
  } else {
    static_cast<T*>(result)[column] = from_float<T>(sum);
  }
}

}  // namespace fuseline
