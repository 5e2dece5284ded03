// A whole decoding step of bf16 weights. See device/step_kernel.cuh.

#include "device/step_kernel.cuh"

namespace fuseline {

FUSELINE_DECODE_STEP(__nv_bfloat16)

}  // namespace fuseline
