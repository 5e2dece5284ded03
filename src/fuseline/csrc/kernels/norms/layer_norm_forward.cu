// The forward of the layer norm and of the RMS norm over x alone: registers (norm_forward_held.cu) and bulk copies
// (norm_forward_copied.cu) take what they can; the kernels of norms/norm_forward_rows.cuh and norm_forward_long.cuh the
// rest: y of fewer bits than x, odd addresses, and rows that no cluster holds.
#include "norm_forward_launch.cuh"

namespace fuseline {

int norm_forward(const NormForward& a, int dtype, int y_dtype, const Device& device, void* stream) {
  int error = 0;
  const bool same = dtype == y_dtype;
  if (same && norm_forward_held(a, dtype, device, stream, error)) return error;
  if (same && norm_forward_copied(a, dtype, device, stream, error)) return error;
  return with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    return run_forward<decltype(x), decltype(y), false>(a, device, stream);
  });
}

}  // namespace fuseline
