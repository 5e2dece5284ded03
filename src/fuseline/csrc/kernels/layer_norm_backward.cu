// The layer norm's backward: the kernels of device/norm_backward.cuh with sums for weight and bias.
#include "device/norm_backward_launch.cuh"

namespace fuseline {

int layer_norm_backward(const NormBackward& a, int dtype, const Device& device, void* stream) {
  return with_dtype(dtype, [&](auto type) {
    return BackwardFamily<decltype(type), kSumsOfLayerNorm, true>::run(a, device, stream);
  });
}

int64_t layer_norm_backward_blocks(int64_t rows, int64_t n, int dtype, const Device& device) {
  int64_t blocks = 0;
  with_dtype(dtype, [&](auto type) {
    blocks = BackwardFamily<decltype(type), kSumsOfLayerNorm, true>::blocks(rows, n, device);
    return 0;
  });
  return blocks;
}

}  // namespace fuseline
