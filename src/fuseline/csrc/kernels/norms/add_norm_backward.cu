// The backward of a norm of residual + dropout(x + x_bias), with sums over rows for weight, bias and x_bias.
#include "norm_backward_launch.cuh"

namespace fuseline {

int launch_add_norm_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return launch_backward<kSumsOfAddedNorm, true>(a, plan, call);
}

}  // namespace fuseline
