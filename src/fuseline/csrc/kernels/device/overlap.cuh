// Kernels that start before the one before them has ended (programmatic dependent launch, sm_90): a launch costs the
// next kernel 2 us of idling otherwise, which a decoding step pays some two hundred times.
//
// A kernel so launched may touch nothing that earlier kernels write before `wait_for_earlier()`, and every kernel that
// is launched so waits, so that when the one before has ended all before it have.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace fuseline {

__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may take what room this one leaves; said by every block, or by its end. Said before wait_for_earlier(),
// the launch before this one may be running as well while the next reads what no earlier kernel writes.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Has a value in its register by here. What is so made ready before wait_for_earlier() costs no time: the compilers would
// rather compute it where it is used.
template <class Value>
__device__ __forceinline__ void make_ready(Value& value) {
  if constexpr (std::is_same_v<Value, float>) {
    asm volatile("" : "+f"(value));
  } else if constexpr (sizeof(Value) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
}

inline cudaLaunchAttribute overlapping() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches a kernel that may start before the one before has ended; `cluster` neighbours of a row of the grid are a cluster.
template <class Arguments>
int launch_overlapping(void (*kernel)(Arguments), const Arguments& arguments, dim3 grid, int threads, size_t shared,
                       int cluster, void* stream) {
  cudaLaunchAttribute attributes[2] = {overlapping(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = unsigned(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments);
  const cudaError_t last = cudaGetLastError();  // also clears it, so that no later call is blamed for it
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
