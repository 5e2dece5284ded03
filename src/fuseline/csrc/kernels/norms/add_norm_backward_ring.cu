// The backward of a norm of residual + dropout(x + x_bias) for long rows: norms/norm_backward_ring.cuh with sums for
// weight, bias and x_bias.
#include "norm_backward_ring_launch.cuh"

namespace fuseline {

bool add_norm_backward_ring(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                            const RowChoice* requested) {
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    using Family = RingFamily<decltype(x), decltype(y), kSumsOfAddedNorm, true>;
    return int(Family::run(a, device, stream, error, requested));
  });
}

int64_t add_norm_backward_ring_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device) {
  int64_t blocks = 0;
  with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    blocks = RingFamily<decltype(x), decltype(y), kSumsOfAddedNorm, true>::blocks(rows, n, device);
    return 0;
  });
  return blocks;
}

}  // namespace fuseline
