// Kernels that start before the one before them has ended (programmatic dependent launch, sm_90): a launch costs the
// next kernel 2 us of idling otherwise, which a decoding step pays some two hundred times.
//
// A kernel so launched may touch nothing that earlier kernels write before `wait_for_earlier()`, and every kernel that
// is launched so waits, so that when the one before has ended all before it have.
#pragma once

#include <cuda_runtime.h>

namespace fuseline {

__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may take what room this one leaves; said by every block, or by its end.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline cudaLaunchAttribute overlapping() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace fuseline
