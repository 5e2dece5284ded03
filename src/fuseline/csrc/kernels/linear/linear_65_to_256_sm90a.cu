// 65 to 256 rows of activations times few quantized weights on Hopper. See linear_65_to_256.cuh.

#include "linear_65_to_256.cuh"
#include "linear_kernels.h"

namespace fuseline {
namespace {

template <class Weights>
auto kernel_of(const LinearPlan& plan) {
  using T = __nv_bfloat16;
  return plan.warpgroups == 2 ? linear_65_to_256_kernel<T, Weights, 2> : linear_65_to_256_kernel<T, Weights, 3>;
}

auto kernel_of(const LinearPlan& plan, int format) {
  return format == FUSELINE_WEIGHT_INT8 ? kernel_of<WeightsInt8>(plan) : kernel_of<WeightsInt4>(plan);
}

}  // namespace

int residents_65_to_256(const LinearPlan& plan, int format, const Device& device) {
  return resident_of(kernel_of(plan, format), plan, device);
}

int launch_65_to_256(const LinearArguments& a, const LinearPlan& plan, int format, const Device& device, void* stream) {
  Call65To256 c{};
  c.a = a;
  c.row_blocks = int(divide_up(a.m, kRows65To256));
  int code = make_tensor_map(c.x, {a.x, a.k, a.m, 1, a.x_stride, a.x_stride * a.m, kRows65To256, FUSELINE_BFLOAT16});
  if (code != 0) return code;
  const int block_tiles = sizes_65_to_256(format, plan.warpgroups).block_tiles, lines = tile_bytes(format) / 128;
  const int64_t a_tile = int64_t(a.chunks) * tile_bytes(format);
  code = make_tensor_map(c.weight, {a.weight, 64, int64_t(a.chunks) * lines, a.tiles, 128, a_tile, lines, FUSELINE_BFLOAT16, false,
                                    block_tiles});
  if (code != 0) return code;
  return launch(kernel_of(plan, format), c, plan.shape, device, stream);
}

}  // namespace fuseline
