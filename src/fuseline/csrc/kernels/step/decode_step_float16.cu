// A whole decoding step of fp16 weights. See step/step_kernel.cuh.

#include "step_kernel.cuh"

namespace fuseline {

FUSELINE_DECODE_STEP(__half)

}  // namespace fuseline
