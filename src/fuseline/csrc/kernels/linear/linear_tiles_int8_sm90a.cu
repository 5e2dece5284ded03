// Many rows of activations times weights of 8 bits on Hopper. See linear/linear_tiles.cuh.

#include "linear_tiles_launch.cuh"

namespace fuseline {

FUSELINE_TILES_KERNELS(__half, WeightsInt8)
FUSELINE_TILES_KERNELS(__nv_bfloat16, WeightsInt8)

}  // namespace fuseline
