// The forward of norms of residual + dropout(x + x_bias), whose rows keep to 16-byte steps and fit the registers of a block or
// a cluster, for tensors of fp32 or bf16.
#include "norm_forward_held_launch.cuh"

namespace fuseline {

int launch_masked_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return call.dtype == FUSELINE_FLOAT32 ? launch_held<float, true, true>(a, plan, call)
                                        : launch_held<__nv_bfloat16, true, true>(a, plan, call);
}

}  // namespace fuseline
