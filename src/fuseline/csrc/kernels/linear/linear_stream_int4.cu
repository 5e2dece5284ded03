// Few rows of activations times weights of 4 bits: streams. See linear_stream.cuh.

#include "linear_kernels.h"
#include "linear_stream.cuh"

namespace fuseline {

LinearFunction stream_int4_kernel_of(const LinearPlan& plan, bool bf16) {
  if (plan.any_groups) return stream_kernel_of<WeightsInt4, true>(plan, bf16);
  return stream_kernel_of<WeightsInt4, false>(plan, bf16);
}

}  // namespace fuseline
