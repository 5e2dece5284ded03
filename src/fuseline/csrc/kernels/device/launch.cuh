// Launches of kernels, and what they ask of the current device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "../fuseline_kernels.h"
#include "../plans/rows.h"
#include "group.cuh"
#include "overlap.cuh"
#include "vector.cuh"

namespace fuseline {

inline cudaError_t current_device(Device& device) {
  constexpr int kKept = 64;
  static thread_local Device kept[kKept];
  int index = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error != cudaSuccess) return error;
  if (index < kKept && kept[index].index == index) {
    device = kept[index];
    return cudaSuccess;
  }
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    const cudaError_t failed = cudaDeviceGetAttribute(&value, name, index);
    if (failed != cudaSuccess) error = failed;
    return value;
  };
  device.processors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_a_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.shared_a_processor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int64_t kilohertz = attribute(cudaDevAttrMemoryClockRate), bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
  device.memory_gbs = int(kilohertz * bits / 4'000'000);  // two transfers a cycle, eight bits a byte
  device.clusters = attribute(cudaDevAttrClusterLaunch) != 0;
  device.warpgroups = attribute(cudaDevAttrComputeCapabilityMajor) == 9 && attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  device.index = index;
  if (error == cudaSuccess && index < kKept) kept[index] = device;
  return error;
}

// Calls run(T{}) with the C++ type of a fuseline_dtype.
template <class Run>
int with_dtype(int dtype, Run&& run) {
  switch (dtype) {
    case FUSELINE_FLOAT32:
      return run(float{});
    case FUSELINE_FLOAT16:
      return run(__half{});
    case FUSELINE_BFLOAT16:
      return run(__nv_bfloat16{});
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

inline bool known_dtype(int dtype) { return dtype >= FUSELINE_FLOAT32 && dtype <= FUSELINE_BFLOAT16; }

inline bool weights_fit(int weight_dtype, int dtype) {
  return weight_dtype == dtype || weight_dtype == FUSELINE_FLOAT32;
}

inline int offset_in_vector(const void* at) { return int(reinterpret_cast<uintptr_t>(at) % 16); }

// `early`: the kernel may start before the one before it has ended, and waits for that itself (overlap.cuh).
template <class Arguments>
int launch(void (*kernel)(Arguments), const Arguments& arguments, int64_t grid, dim3 block, size_t shared,
           int cluster, void* stream, bool early = false) {
  if (grid > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = unsigned(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (early) attributes[config.numAttrs++] = overlapping();
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments);
  const cudaError_t last = cudaGetLastError();  // also clears it, so that no later call is blamed for it
  return int(launched != cudaSuccess ? launched : last);
}

template <class Arguments>
int launch(void (*kernel)(Arguments), const Arguments& arguments, const LaunchShape& shape, const Device& device, void* stream) {
  return launch(kernel, arguments, shape.grid, dim3(unsigned(shape.threads), unsigned(shape.beside)), shape.shared,
                shape.cluster, stream, device.clusters);
}

// Clusters the device can hold at once, which its layout may make fewer than multiprocessors / cluster: a cluster too
// many would run after all others.
template <class Arguments>
cudaError_t clusters_at_once(void (*kernel)(Arguments), int cluster, dim3 block, size_t shared, int& count) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(cluster));
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&count, kernel, &config);
}

// Lets a kernel have `bytes` of dynamic shared memory; never less than it had, for another thread may count on that.
inline cudaError_t allow_shared(const void* kernel, int bytes) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> held(one_at_a_time);
  cudaFuncAttributes now{};
  cudaError_t error = cudaFuncGetAttributes(&now, kernel);
  if (error == cudaSuccess && now.maxDynamicSharedSizeBytes < bytes) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  return error;
}

// How many clusters of blocks, or blocks that are alone, the device can hold at once, which its layout may make fewer
// than multiprocessors / cluster: one too many would run after all others. Also lets the kernel have `shared` bytes.
// Asked once a thread, kernel and layout.
template <class Arguments>
cudaError_t resident_clusters(void (*kernel)(Arguments), const Device& device, int threads, size_t shared, int cluster,
                              int& count) {
  struct Kept {
    void (*kernel)(Arguments);
    int device, threads, cluster, count;
    size_t shared;
  };
  constexpr int kKept = 32;
  static thread_local Kept kept[kKept];
  static thread_local int next = 0;
  for (const Kept& one : kept) {
    if (one.kernel == kernel && one.device == device.index && one.threads == threads && one.shared == shared &&
        one.cluster == cluster) {
      count = one.count;
      return cudaSuccess;
    }
  }
  cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), int(shared));
  if (error != cudaSuccess) return error;
  if (cluster == 1) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared);
    count *= device.processors;
  } else {
    error = clusters_at_once(kernel, cluster, dim3(threads), shared, count);
  }
  if (error != cudaSuccess) return error;
  kept[next] = {kernel, device.index, threads, cluster, count, shared};
  next = (next + 1) % kKept;
  return cudaSuccess;
}

}  // namespace fuseline
