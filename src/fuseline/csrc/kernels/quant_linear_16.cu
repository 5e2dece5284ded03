// Few rows of activations times weights of 16 bits, as torch.nn.Linear keeps them. See device/quant_linear.cuh.

#include "device/quant_linear.cuh"

namespace fuseline {

int launch_linear_16(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  return launch_linear<Weights16>(a, call, stream);
}

}  // namespace fuseline
