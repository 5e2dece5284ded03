// The forward of the layer norm and of the RMS norm: the kernels of device/norm_forward_rows.cuh and
// norm_forward_long.cuh over x alone.
#include "device/norm_forward_launch.cuh"

namespace fuseline {

int norm_forward(const NormForward& a, int dtype, const Device& device, void* stream) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return run_forward<T, T, false>(a, device, stream);
  });
}

}  // namespace fuseline
