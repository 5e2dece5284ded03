// The layer norm's backward, with sums over rows for weight and bias.
#include "norm_backward_launch.cuh"

namespace fuseline {

int launch_layer_norm_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return launch_backward<kSumsOfLayerNorm, true>(a, plan, call);
}

}  // namespace fuseline
