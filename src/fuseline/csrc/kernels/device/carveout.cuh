// How a multiprocessor splits its memory into L1 and shared memory while kernels of a chain follow each other.
#pragma once

#include <cuda_runtime.h>

namespace fuseline {

// Has all blocks of `kernel` run with the most shared memory. The split changes only while nothing runs on a
// multiprocessor, and by default each kernel has the one that its own blocks need: the first blocks of a launch would
// have to wait for the last of the launch before wherever two kernels of a chain need different ones. `done` is the
// caller's own: the device where this was last asked for.
template <class... Arguments>
cudaError_t take_most_shared(void (*kernel)(Arguments...), int device, int& done) {
  if (done == device) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) done = device;
  return error;
}

}  // namespace fuseline
