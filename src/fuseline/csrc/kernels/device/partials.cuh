// Adding up the partial sums that blocks leave behind: in a fixed order, so that the bits are the same each run.
#pragma once

#include "launch.cuh"

namespace fuseline {

constexpr int kPartialsWarps = 32;

// result[c] = the sum of partials[p * n + c] over p < count, in fp32 or T. A block has 32 columns; its warps share the
// partial sums of them.
template <class T>
__global__ void __launch_bounds__(kWarp* kPartialsWarps)
    add_partials(const float* partials, int64_t count, int64_t n, void* result, bool fp32_result) {
  __shared__ float shared[kPartialsWarps][kWarp + 1];
  const int64_t c = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.f;
  if (c < n) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < count; p += kPartialsWarps) sum += partials[p * n + c];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = shared[threadIdx.x][threadIdx.y];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const int64_t column = int64_t(blockIdx.x) * kWarp + threadIdx.y;
  if (threadIdx.x != 0 || column >= n) return;
  if (fp32_result) {
    static_cast<float*>(result)[column] = sum;
  } else {
    static_cast<T*>(result)[column] = from_float<T>(sum);
  }
}

template <class T>
int run_add_partials(const float* partials, int64_t count, int64_t n, void* result, bool fp32_result, void* stream) {
  add_partials<T><<<dim3(unsigned(divide_up(n, kWarp))), dim3(kWarp, kPartialsWarps), 0,
                    static_cast<cudaStream_t>(stream)>>>(partials, count, n, result, fp32_result);
  return int(cudaGetLastError());
}

}  // namespace fuseline
