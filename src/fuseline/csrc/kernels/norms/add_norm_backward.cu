// The backward of a norm of residual + dropout(x + x_bias): the kernels of norms/norm_backward_rows.cuh with sums for
// weight, bias and x_bias.
#include "norm_backward_launch.cuh"

namespace fuseline {

int add_norm_backward(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream,
                      const RowChoice* requested) {
  return with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    return BackwardFamily<decltype(x), decltype(y), kSumsOfAddedNorm, true>::run(a, device, stream, requested);
  });
}

int64_t add_norm_backward_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device) {
  int64_t blocks = 0;
  with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    blocks = BackwardFamily<decltype(x), decltype(y), kSumsOfAddedNorm, true>::blocks(rows, n, device);
    return 0;
  });
  return blocks;
}

}  // namespace fuseline
