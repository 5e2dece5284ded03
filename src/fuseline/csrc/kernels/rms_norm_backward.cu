// The RMS norm's backward: the kernels of device/norm_backward.cuh with a sum for weight.
#include "device/norm_backward_launch.cuh"

namespace fuseline {

int rms_norm_backward(const NormBackward& a, int dtype, const Device& device, void* stream) {
  return with_dtype(dtype, [&](auto type) {
    return BackwardFamily<decltype(type), kSumsOfRmsNorm, false>::run(a, device, stream);
  });
}

int64_t rms_norm_backward_blocks(int64_t rows, int64_t n, int dtype, const Device& device) {
  int64_t blocks = 0;
  with_dtype(dtype, [&](auto type) {
    blocks = BackwardFamily<decltype(type), kSumsOfRmsNorm, false>::blocks(rows, n, device);
    return 0;
  });
  return blocks;
}

}  // namespace fuseline
