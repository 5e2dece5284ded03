// Some hundred rows of activations times few weights of 8 bits on Hopper. See linear/linear_65_to_256.cuh.

#include "linear_65_to_256_launch.cuh"

namespace fuseline {

int run_65_to_256_int8(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  return call.dtype == FUSELINE_BFLOAT16 ? run_hundreds<__nv_bfloat16, WeightsInt8>(a, call, stream)
                                         : run_hundreds<__half, WeightsInt8>(a, call, stream);
}

}  // namespace fuseline
