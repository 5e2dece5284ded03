// Few rows of activations times weights of 8 bits: streams. See linear_stream.cuh.

#include "linear_stream_launch.cuh"

namespace fuseline {

FUSELINE_STREAM_KERNELS(__half, WeightsInt8)
FUSELINE_STREAM_KERNELS(__nv_bfloat16, WeightsInt8)

}  // namespace fuseline
