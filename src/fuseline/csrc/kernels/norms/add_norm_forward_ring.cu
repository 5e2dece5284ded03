// The forward of a norm of residual + dropout(x + x_bias), the residual in fp32 and x in 16 bits, for rows that come and leave in
// bulk copies (sm_90).
#include "norm_forward_added.cuh"

namespace fuseline {

int launch_norm_added(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return call.y_dtype == FUSELINE_FLOAT16 ? launch_added<float, __half>(a, plan, call)
                                          : launch_added<float, __nv_bfloat16>(a, plan, call);
}

}  // namespace fuseline
