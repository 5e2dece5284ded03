// One row of activations times weights of 8 or 4 bits, on Hopper. See linear_row.cuh.

#include "linear_kernels.h"
#include "linear_row.cuh"

namespace fuseline {

LinearFunction row_kernel_of(int format, bool bf16) {
  if (format == FUSELINE_WEIGHT_INT8) {
    return bf16 ? linear_row_kernel<__nv_bfloat16, WeightsInt8> : linear_row_kernel<__half, WeightsInt8>;
  }
  return bf16 ? linear_row_kernel<__nv_bfloat16, WeightsInt4> : linear_row_kernel<__half, WeightsInt4>;
}

}  // namespace fuseline
