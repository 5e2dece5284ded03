// The forward of norms, of x or of residual + dropout(x + x_bias), whose rows come to shared memory in bulk copies (sm_90), for
// tensors of one dtype.
#include "norm_forward_copied.cuh"

namespace fuseline {

int launch_norm_copied(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    if (!a.residual) return launch_copied<T, false, false>(a, plan, call);
    if (a.x_bias || a.dropout.seed) return launch_copied<T, true, true>(a, plan, call);
    return launch_copied<T, true, false>(a, plan, call);
  });
}

}  // namespace fuseline
