// Adding up the partial sums that blocks leave behind: in a fixed order, so that the bits are the same each run.
#pragma once

#include "device/launch.cuh"
#include "device/overlap.cuh"

namespace fuseline {

constexpr int kPartialsColumns = 8;  // a sector of each row
constexpr int kPartialsRows = 128;
constexpr int kFewPartials = 64;  // up to which a thread adds up a column alone: long rows have thousands of columns
constexpr int kFewPartialsBlock = 128;

struct Partials {
  const float* from;
  int64_t count, n;
  void* result;
  int dtype;  // of the result
};

// result[c] = the sum of from[p * n + c] over p < count. A block has a few columns, and its threads share the partial sums
// of them.
__global__ void __launch_bounds__(kPartialsColumns* kPartialsRows) add_partials(const Partials a) {
  __shared__ float shared[kPartialsColumns][kPartialsRows + 1];
  let_next_start();
  wait_for_earlier();
  const int64_t c = int64_t(blockIdx.x) * kPartialsColumns + threadIdx.x;
  float sum = 0.f;
  if (c < a.n) {
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < a.count; p += kPartialsRows) sum += a.from[p * a.n + c];
  }
  shared[threadIdx.x][threadIdx.y] = sum;
  __syncthreads();
  const int thread = int(threadIdx.y) * kPartialsColumns + int(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int64_t column = int64_t(blockIdx.x) * kPartialsColumns + warp;
  if (warp >= kPartialsColumns || column >= a.n) return;
  sum = 0.f;
#pragma unroll
  for (int p = lane; p < kPartialsRows; p += kWarp) sum += shared[warp][p];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (lane == 0) store_as(a.result, a.dtype, column, sum);
}

__global__ void __launch_bounds__(kFewPartialsBlock) add_few_partials(const Partials a) {
  let_next_start();
  wait_for_earlier();
  const int64_t c = int64_t(blockIdx.x) * kFewPartialsBlock + threadIdx.x;
  if (c >= a.n) return;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t p = 0; p < a.count; ++p) sum += a.from[p * a.n + c];
  store_as(a.result, a.dtype, c, sum);
}

inline int run_add_partials(const float* partials, int64_t count, int64_t n, void* result, int dtype, const Device& device,
                            void* stream) {
  const Partials a{partials, count, n, result, dtype};
  if (count <= kFewPartials && n >= int64_t(kFewPartials) * kFewPartialsBlock) {
    return launch(add_few_partials, a, divide_up(n, kFewPartialsBlock), dim3(kFewPartialsBlock), 0, 1, stream,
                  device.clusters);
  }
  return launch(add_partials, a, divide_up(n, kPartialsColumns), dim3(kPartialsColumns, kPartialsRows), 0, 1, stream,
                device.clusters);
}

}  // namespace fuseline
