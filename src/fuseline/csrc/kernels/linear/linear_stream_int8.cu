// Few rows of activations times weights of 8 bits: streams. See linear_stream.cuh.

#include "linear_kernels.h"
#include "linear_stream.cuh"

namespace fuseline {

LinearFunction stream_int8_kernel_of(const LinearPlan& plan, bool bf16) {
  return stream_kernel_of<WeightsInt8, false>(plan, bf16);
}

}  // namespace fuseline
