// The forward of norms, of x or of residual + dropout(x + x_bias), of two dtypes or at any address: the kernels of
// norm_forward_rows.cuh and norm_forward_long.cuh.
#include "norm_forward_launch.cuh"

namespace fuseline {

int launch_norm_rows(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    return a.residual ? launch_rows<X, Y, true>(a, plan, call) : launch_rows<X, Y, false>(a, plan, call);
  });
}

}  // namespace fuseline
