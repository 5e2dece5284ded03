// A whole decoding step of bf16 weights. See step/step_kernel.cuh.

#include "step_kernel.cuh"

namespace fuseline {

FUSELINE_DECODE_STEP(__nv_bfloat16)

}  // namespace fuseline
