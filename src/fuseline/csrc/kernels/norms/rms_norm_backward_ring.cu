// The RMS norm's backward for long rows: norms/norm_backward_ring.cuh with sums for the weight.
#include "norm_backward_ring_launch.cuh"

namespace fuseline {

bool rms_norm_backward_ring(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                            const RowChoice* requested) {
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    return int(RingFamily<decltype(x), decltype(y), kSumsOfRmsNorm, false>::run(a, device, stream, error, requested));
  });
}

int64_t rms_norm_backward_ring_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device) {
  int64_t blocks = 0;
  with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    blocks = RingFamily<decltype(x), decltype(y), kSumsOfRmsNorm, false>::blocks(rows, n, device);
    return 0;
  });
  return blocks;
}

}  // namespace fuseline
