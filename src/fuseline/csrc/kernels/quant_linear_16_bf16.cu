// Few rows of activations in bf16 times weights of 16 bits, as torch.nn.Linear keeps them. See device/quant_linear.cuh.

#include "device/quant_linear.cuh"

namespace fuseline {

FUSELINE_LINEAR_KERNELS(__nv_bfloat16, Weights16)

}  // namespace fuseline
