// Few rows of activations times weights of 16 bits, as torch.nn.Linear keeps them: streams. See linear_stream.cuh.

#include "linear_kernels.h"
#include "linear_stream.cuh"

namespace fuseline {

LinearFunction stream_16_kernel_of(const LinearPlan& plan, bool bf16) {
  return stream_kernel_of<Weights16, false>(plan, bf16);
}

}  // namespace fuseline
