// The host's half of the attention kernels: from a plan's tiles to a kernel's, and the launch.
#pragma once

#include "../plans/attention_backward.h"
#include "attention_call.cuh"
#include "launch.cuh"

namespace fuseline {

// Calls run(width, plain) with these of the plan's tiles, as constants: of general attention by products of warps
// (width_by_warps of plans/attention.h).
template <class T, class Run>
int with_tiles(const AttentionLaunch& by, Run&& run) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (!std::is_same_v<T, float>) {
    const auto plain = [&](auto width) { return run(width, std::true_type{}); };
    if (by.plain) return with_size<kHalf ? 64 : 32, kHalf ? 128 : kWidestHead>(by.width, plain);
  }
  return with_size<64, kWidestHead>(by.width, [&](auto width) { return run(width, std::false_type{}); });
}

// A kernel has 48 KB of shared memory unless it is allowed more, with up to 1 KB that it declares.
constexpr int kUngranted = 47 * 1024;
// Kernels that may have more on a device, and how much, the last of this thread.
struct Granted {
  const void* kernel;
  int device, bytes;
};
constexpr int kGranted = 32;
inline Granted* granted() {
  static thread_local Granted kept[kGranted] = {};
  return kept;
}
inline bool is_granted(const void* kernel, int device, int bytes) {
  return std::any_of(granted(), granted() + kGranted, [&](const Granted& one) {
    return one.kernel == kernel && one.device == device && one.bytes >= bytes;
  });
}
inline void grant(const void* kernel, int device, int bytes) {
  static thread_local int next = 0;
  for (Granted* one = granted(); one != granted() + kGranted; ++one) {
    if (one->kernel == kernel && one->device == device) {
      one->bytes = bytes;
      return;
    }
  }
  granted()[next] = {kernel, device, bytes};
  next = (next + 1) % kGranted;
}

// Launches a kernel of (arguments, tiles) as the plan says; `early`: it waits for the kernel before itself (overlap.cuh).
template <class Arguments>
int launch_attention(void (*kernel)(Arguments, int), const Arguments& arguments, const AttentionLaunch& by, void* stream,
                     bool early = false) {
  if (by.shape.grid > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const int shared = int(by.shape.shared);
  if (shared > kUngranted && !is_granted(reinterpret_cast<const void*>(kernel), device.index, shared)) {
    error = allow_shared(reinterpret_cast<const void*>(kernel), shared);
    if (error != cudaSuccess) return int(error);
    grant(reinterpret_cast<const void*>(kernel), device.index, shared);
  }
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
