// The forward of norms of residual + x, without a bias or a mask, whose rows keep to 16-byte steps and fit the registers of a
// block or a cluster, for tensors of one dtype.
#include "norm_forward_held_launch.cuh"

namespace fuseline {

int launch_add_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtype(call.dtype, [&](auto type) { return launch_held<decltype(type), true>(a, plan, call); });
}

}  // namespace fuseline
