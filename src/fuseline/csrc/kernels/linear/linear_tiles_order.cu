// Puts activations in the order of linear_tiles.cuh: each of their bytes read and written once, in the L2.

#include "linear_tiles_order.cuh"

namespace fuseline {
namespace {

// A thread has 16 bytes of x; a warp eight rows and half a chunk.
__global__ void __launch_bounds__(kLinearThreads) order_x_kernel(const LinearArguments a, int rows) {
  if (a.overlap) let_next_start();  // its weights stand
  wait_for_earlier();
  if (!a.overlap) let_next_start();  // what starts may read all that earlier launches wrote
  const int halves = 4 * a.steps;
  const int lane = threadIdx.x % kWarp, quad = lane % 4;
  const int64_t warp = int64_t(blockIdx.x) * kLinearWarps + threadIdx.x / kWarp;
  const int half = int(warp % halves), row = int(warp / halves) * 8 + lane / 4;
  if (row >= a.m) return;
  const int column = half * 32 + quad * 8;
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (column < a.k) {
    const char* const from = a.x + row * a.x_stride;
    raw = a.x_vectors ? *reinterpret_cast<const uint4*>(from + int64_t(column) * 2) : load_eight(from, column, a.k);
  }
  const int64_t chunk = int64_t(row / rows) * (2 * a.steps) + half / 2;
  char* const to = a.workspace + chunk * rows * 128 + (half % 2 * 4 * rows + row % rows) * 16 + quad * 4;
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + i * rows * 16) = words[i];
}

}  // namespace

int launch_order_x(const LinearArguments& a, int rows, void* stream) {
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(divide_up(divide_up(a.m, 8) * 4 * a.steps, kLinearWarps)));
  config.blockDim = dim3(kLinearThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, order_x_kernel, a, rows);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
