// The forward of norms whose rows keep to 16-byte steps and fit the registers of a block, or a cluster, for x of y's dtype.
#include "norm_forward_held_launch.cuh"

namespace fuseline {

int launch_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtype(call.dtype, [&](auto type) { return launch_held<decltype(type), false>(a, plan, call); });
}

}  // namespace fuseline
