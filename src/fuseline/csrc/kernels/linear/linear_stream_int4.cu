// Few rows of activations times weights of 4 bits: streams. See linear_stream.cuh.

#include "linear_stream_launch.cuh"

namespace fuseline {

FUSELINE_STREAM_KERNELS(__half, WeightsInt4)
FUSELINE_STREAM_KERNELS(__nv_bfloat16, WeightsInt4)

}  // namespace fuseline
