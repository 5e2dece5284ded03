// The forward of a norm of residual + dropout(x + x_bias): registers (add_norm_forward_held.cu, and with a mask or a bias of x
// add_norm_forward_masked.cu), bulk copies (add_norm_forward_copied.cu) where nothing is dropped or added besides, else the
// kernel of add_norm_forward_ring.cu, and for rows that none takes those of device/norm_forward_rows.cuh and
// norm_forward_long.cuh with a sum.
#include <cstdlib>

#include "device/norm_forward_launch.cuh"

namespace fuseline {

int add_norm_forward(const NormForward& a, int dtype, int y_dtype, const Device& device, void* stream) {
  int error = 0;
  const bool same = dtype == y_dtype;
  if (same && add_norm_forward_held(a, dtype, device, stream, error)) return error;
  const char* const trial = std::getenv("FUSELINE_B_FW");  // trial: rows from this length on come in bulk copies
  const bool copied_first = trial && a.n >= std::atoll(trial);
  if (same && copied_first && add_norm_forward_copied(a, dtype, device, stream, error)) return error;
  if (same && add_norm_forward_masked(a, dtype, device, stream, error)) return error;
  if (same && add_norm_forward_copied(a, dtype, device, stream, error)) return error;
  if (add_norm_forward_ring(a, dtype, y_dtype, device, stream, error)) return error;
  return with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    return run_forward<decltype(x), decltype(y), true>(a, device, stream);
  });
}

}  // namespace fuseline
