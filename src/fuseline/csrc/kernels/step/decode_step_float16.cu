// A whole decoding step of fp16 weights. See device/step_kernel.cuh.

#include "device/step_kernel.cuh"

namespace fuseline {

FUSELINE_DECODE_STEP(__half)

}  // namespace fuseline
