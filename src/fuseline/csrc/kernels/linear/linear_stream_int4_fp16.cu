// Few rows of activations in fp16 times weights of 4 bits: streams. See linear/linear_stream.cuh.

#include "linear_stream_launch.cuh"

namespace fuseline {

FUSELINE_STREAM_KERNELS(__half, WeightsInt4)

}  // namespace fuseline
