// Adds up the partial sums over rows that a norm's backward leaves behind, in fp64 and in a fixed order: the bits are the same
// each run. The dtype of the results is an argument: this kernel is a small part of any backward, and one for all of them.
#include "norm.cuh"
#include "device/overlap.cuh"

namespace fuseline {
namespace {

constexpr int64_t kLongRow = 4096;  // elements, from which there are blocks enough for four columns a lane

struct NormSums {
  NormBackward norm;
  int count;  // partial sums of a column
  int dtype;  // of results
};

// blockIdx.y: 0 for weight, 1 for bias, 2 for the bias before the dropout. A lane has kWide columns, and the warps of a block
// share the partial sums of them.
template <int kWide>
__global__ void __launch_bounds__(1024) norm_add_partials(const NormSums given) {
  constexpr int kColumns = kWarp * kWide;  // of a block
  __shared__ double shared[kWarp][kColumns];
  const NormBackward& a = given.norm;
  void* const result = blockIdx.y == 0 ? a.grad_weight : blockIdx.y == 1 ? a.grad_bias : a.grad_x_bias;
  let_next_start();
  wait_for_earlier();
  if (!result) return;
  const int64_t from = int64_t(blockIdx.x) * kColumns;
  const int64_t c = from + threadIdx.x * kWide;
  const float* partials = a.partials + int64_t(blockIdx.y) * given.count * a.columns + c;
  double sums[kWide] = {};
  if (c < a.n) {
#pragma unroll 4
    for (int p = threadIdx.y; p < given.count; p += blockDim.y) {
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
  store_as(result, given.dtype, from + column, float(sum));
}

}  // namespace

int add_partials(const NormBackward& a, int kinds, int count, const NormCall& call) {
  const bool wide = a.n >= kLongRow;
  const int most = power_of_two_from(divide_up(count, 4));  // four partial sums a warp are all on their way at once
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(divide_up(a.n, kWarp * (wide ? 4 : 1))), unsigned(kinds));
  config.blockDim = dim3(kWarp, unsigned(std::clamp(most, 4, kWarp)));
  config.stream = static_cast<cudaStream_t>(call.stream);
  config.attrs = &attribute;
  config.numAttrs = call.device.clusters ? 1 : 0;
  const NormSums given{a, count, a.fp32_weights ? int(FUSELINE_FLOAT32) : call.y_dtype};
  const cudaError_t launched = cudaLaunchKernelEx(&config, wide ? norm_add_partials<4> : norm_add_partials<1>, given);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
