// Few rows of activations times weights of 16 bits, as torch.nn.Linear keeps them: streams. See linear_stream.cuh.

#include "linear_stream_launch.cuh"

namespace fuseline {

FUSELINE_STREAM_KERNELS(__half, Weights16)
FUSELINE_STREAM_KERNELS(__nv_bfloat16, Weights16)

}  // namespace fuseline
