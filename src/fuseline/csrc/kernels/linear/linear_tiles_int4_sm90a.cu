// Many rows of activations times weights of 4 bits on Hopper. See linear_tiles.cuh.

#include "linear_kernels.h"
#include "linear_tiles.cuh"

namespace fuseline {
namespace {

template <int kRows, bool kAnyGroups>
LinearFunction kernel_of(const LinearPlan& plan) {
  using T = __nv_bfloat16;
  return plan.splits > 1 ? linear_tiles_kernel<T, WeightsInt4, kRows, kAnyGroups, true>
                         : linear_tiles_kernel<T, WeightsInt4, kRows, kAnyGroups, false>;
}

}  // namespace

LinearFunction tiles_int4_kernel_of(const LinearPlan& plan) {
  if (plan.any_groups) return kernel_of<32, true>(plan);
  return plan.x_rows == 32    ? kernel_of<32, false>(plan)
         : plan.x_rows == 64  ? kernel_of<64, false>(plan)
         : plan.x_rows == 128 ? kernel_of<128, false>(plan)
                              : kernel_of<kMostTiledRows, false>(plan);
}

}  // namespace fuseline
