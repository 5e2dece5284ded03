// Few rows of activations in bf16 times weights of 4 bits. See device/quant_linear.cuh.

#include "device/quant_linear.cuh"

namespace fuseline {

FUSELINE_LINEAR_KERNELS(__nv_bfloat16, WeightsInt4)

}  // namespace fuseline
