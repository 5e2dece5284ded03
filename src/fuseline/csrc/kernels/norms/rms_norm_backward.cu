// The RMS norm's backward, with a sum over rows for weight.
#include "norm_backward_launch.cuh"

namespace fuseline {

int launch_rms_norm_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return launch_backward<kSumsOfRmsNorm, false>(a, plan, call);
}

}  // namespace fuseline
