// The forward of norms, of x or of residual + dropout(x + x_bias), for rows that no cluster's shared memory holds: the last
// kernel of norms/norm_forward_long.cuh.
#include "norm_forward_long.cuh"

namespace fuseline {

int launch_norm_streamed(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    NormForward of_rows = a;
    of_rows.cluster = plan.shape.cluster;
    const dim3 block(unsigned(plan.shape.threads));
    const auto kernel = norm_forward_streamed<decltype(x), decltype(y)>;
    return launch(kernel, of_rows, plan.shape.grid, block, 0, plan.shape.cluster, call.stream);
  });
}

}  // namespace fuseline
