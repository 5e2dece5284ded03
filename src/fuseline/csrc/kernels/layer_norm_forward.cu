// The forward of the layer norm and of the RMS norm: the kernels of device/norm_forward.cuh over x alone.
#include "device/norm_forward_launch.cuh"

namespace fuseline {

int norm_forward(const NormForward& a, int dtype, const Device& device, void* stream) {
  return with_dtype(dtype, [&](auto type) { return run_forward<decltype(type), false>(a, device, stream); });
}

}  // namespace fuseline
