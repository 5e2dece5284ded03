// Launching blocks that stay: as many as the device holds at once, each taking row after row.
#pragma once

#include "launch.cuh"

namespace fuseline {

// Launches `blocks` blocks or clusters, made fewer where the device cannot hold them at once; one multiprocessor holds
// one block. `most_shared`: bytes of dynamic shared memory that this kernel may ever ask for.
template <auto kKernel, class Arguments>
int launch_resident(const Arguments& a, int& blocks, dim3 block, int cluster, size_t shared, int most_shared,
                    const Device& device, void* stream) {
  constexpr int kDevices = 64;
  static thread_local bool allowed[kDevices];
  static thread_local int at_once[kDevices][kMaxCluster + 1];
  const bool kept = device.index < kDevices;
  if (!kept || !allowed[device.index]) {
    const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
    if (error != cudaSuccess) return int(error);
    if (kept) allowed[device.index] = true;
  }
  if (cluster > 1) {
    int count = kept ? at_once[device.index][cluster] : 0;
    if (count == 0) {
      const cudaError_t error = clusters_at_once(+kKernel, cluster, block, shared, count);
      if (error != cudaSuccess) return int(error);
      if (kept) at_once[device.index][cluster] = count;
    }
    blocks = std::max(1, std::min(blocks, count));
  }
  return launch(+kKernel, a, int64_t(blocks) * cluster, block, shared, cluster, stream);
}

}  // namespace fuseline
