// Many rows of activations times weights of 4 bits on Hopper. See linear/linear_tiles.cuh.

#include "linear_tiles_launch.cuh"

namespace fuseline {

FUSELINE_TILES_KERNELS(__half, WeightsInt4)
FUSELINE_TILES_KERNELS(__nv_bfloat16, WeightsInt4)

}  // namespace fuseline
