// The forward of a norm of residual + dropout(x + x_bias) for rows that come and leave in bulk copies (sm_90).
#include "device/norm_forward_added.cuh"

namespace fuseline {

bool add_norm_forward_ring(const NormForward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                           const RowChoice* requested) {
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    return int(run_forward_added<decltype(x), decltype(y)>(a, device, stream, error, requested));
  });
}

}  // namespace fuseline
