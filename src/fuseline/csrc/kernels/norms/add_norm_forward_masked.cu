// The forward of norms of residual + dropout(x + x_bias), whose rows keep to 16-byte steps and fit the registers of a block or
// a cluster, for tensors of one dtype.
#include "norm_forward_held_launch.cuh"

namespace fuseline {

int launch_masked_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtype(call.dtype, [&](auto type) { return launch_held<decltype(type), true, true>(a, plan, call); });
}

}  // namespace fuseline
