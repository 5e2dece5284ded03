// Few rows of activations in bf16 times weights of 16 bits, as torch.nn.Linear keeps them: streams. See linear/linear_stream.cuh.

#include "linear_stream_launch.cuh"

namespace fuseline {

FUSELINE_STREAM_KERNELS(__nv_bfloat16, Weights16)

}  // namespace fuseline
