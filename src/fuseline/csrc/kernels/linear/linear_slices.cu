// 5 to 32 rows of activations times quantized weights: slices. See linear_slices.cuh.

#include "linear_kernels.h"
#include "linear_slices.cuh"

namespace fuseline {

LinearFunction slices_kernel_of(const LinearPlan& plan, int format) {
  using T = __nv_bfloat16;
  if (format == FUSELINE_WEIGHT_INT4) return linear_slices_kernel<T, WeightsInt4, 2>;
  return plan.column_blocks == 1   ? linear_slices_kernel<T, WeightsInt8, 1>
         : plan.column_blocks == 2 ? linear_slices_kernel<T, WeightsInt8, 2>
                                   : linear_slices_kernel<T, WeightsInt8, 4>;
}

}  // namespace fuseline
