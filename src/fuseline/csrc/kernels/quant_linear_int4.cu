// Few rows of activations times weights of 4 bits. See device/quant_linear.cuh.

#include "device/quant_linear.cuh"

namespace fuseline {

int launch_linear_int4(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  return launch_linear<WeightsInt4>(a, call, stream);
}

}  // namespace fuseline
