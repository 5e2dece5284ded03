// Few rows of activations in fp16 times weights of 4 bits: streams. See device/linear_stream.cuh.

#include "device/linear_stream_launch.cuh"

namespace fuseline {

FUSELINE_STREAM_KERNELS(__half, WeightsInt4)

}  // namespace fuseline
