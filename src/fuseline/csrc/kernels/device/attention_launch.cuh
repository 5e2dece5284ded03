// The host's half of the attention kernels: from a plan's tiles to a kernel's, and the launch.
#pragma once

#include "../plans/attention_backward.h"
#include "attention_call.cuh"
#include "launch.cuh"

namespace fuseline {

// The widths of general attention by products of warps (width_by_warps of plans/attention.h).
template <class T, bool kPlain, class Run>
int with_tiles(const AttentionLaunch& by, Run&& run) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  return with_size<kPlain && !kHalf ? 32 : 64, kPlain && kHalf ? 128 : kWidestHead>(by.width, run);
}

// Launches a kernel of (arguments, tiles) as the plan says; `early`: it waits for the kernel before itself (overlap.cuh).
template <class Arguments>
int launch_attention(void (*kernel)(Arguments, int), const Arguments& arguments, const AttentionLaunch& by, void* stream,
                     bool early = false) {
  if (by.shape.grid > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  error = allow_shared(reinterpret_cast<const void*>(kernel), device, int(by.shape.shared));
  if (error != cudaSuccess) return int(error);
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(by.shape.grid)), config.blockDim = dim3(unsigned(by.shape.threads));
  config.dynamicSmemBytes = by.shape.shared, config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = early && device.clusters ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments, by.tiles);
  const cudaError_t last = cudaGetLastError();  // also clears it
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
