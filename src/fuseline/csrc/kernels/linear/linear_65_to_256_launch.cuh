// The launcher of linear_65_to_256.cuh.
#pragma once

#include "linear_65_to_256.cuh"

namespace fuseline {

// Warpgroups of a block, blocks that share a tile, and the microseconds that it should take; 0 warpgroups if there is none.
struct HundredsPlan {
  int warpgroups = 0, splits = 0;
  double us = 0;
};

constexpr int kHundredsSplits[] = {1, 2, 3, 4, 6, 8};

// What linear_tiles.cuh takes, give or take 7%: fitted to 236 products of 65 to 256 rows in either format, 768 to 14336
// columns and 512 to 28672 rows of W. A block has a run of all tiles' steps, and who begins a tile adds the others' sums; or a
// cluster shares a tile.
template <class Weights>
double tiles_us(const LinearArguments& a, int processors) {
  const bool many = a.m > kHundredsRows;
  const double around = many ? 9.2 : 7.8, a_step = many ? 1.48 : 1.7, another = many ? 1.9 : Weights::kGrouped ? 1.6 : 3.3;
  const double shared = many ? 0.3 : 0.6;
  const int64_t tiles = divide_up(a.tiles, many ? 8 : 16), steps = divide_up(a.chunks, kStepChunks);
  const int64_t run = divide_up(tiles * steps, processors);
  double us = around + a_step * run + another * divide_up(steps - 1, run);
  for (int splits = 2; splits <= std::min<int64_t>(steps, kMostSplits); ++splits) {
    const int64_t clusters = processors * (splits == 2 ? 16 : 15) / 16 / splits;
    const int64_t waves = divide_up(tiles, std::max<int64_t>(clusters, 1));
    us = std::min(us, waves * (around + shared + a_step * divide_up(steps, splits)));
  }
  return us;
}

// The best for blocks that all run at once, of what `asked_splits` leaves open; times give or take 8%.
template <class T, class Weights>
cudaError_t plan_hundreds(const LinearArguments& a, const Device& device, int asked_splits, HundredsPlan& plan) {
  const int64_t row_blocks = divide_up(a.m, kHundredsRows);
  const auto consider = [&](auto kernel, auto shape, int warpgroups, int most_splits, double around, double shares,
                            double a_step) -> cudaError_t {
    using Shape = decltype(shape);
    const int64_t tiles = divide_up(a.tiles, Shape::kBlockTiles) * row_blocks;
    for (const int splits : kHundredsSplits) {
      if (splits > a.chunks || (asked_splits ? asked_splits != splits : splits > most_splits)) continue;
      int clusters = 0;
      const cudaError_t error = resident_clusters(kernel, device, Shape::kThreads, size_t(Shape::kShared), splits, clusters);
      if (error != cudaSuccess) return error;
      if (clusters == 0 || (tiles > clusters && !asked_splits)) continue;
      const double each = around + (splits > 1 ? shares : 0) + a_step * divide_up(a.chunks, splits);
      const double us = each * divide_up(tiles, clusters);
      if (plan.warpgroups == 0 || us < plan.us) plan = {warpgroups, splits, us};
    }
    return cudaSuccess;
  };
  constexpr bool kInt4 = Weights::kGrouped;
  cudaError_t error =
      consider(linear_65_to_256_kernel<T, Weights, 2>, Shape65To256<Weights, 2>{}, 2, 8, 2.7, 2.9, kInt4 ? 0.52 : 0.41);
  if (error == cudaSuccess) {
    error = consider(linear_65_to_256_kernel<T, Weights, 3>, Shape65To256<Weights, 3>{}, 3, 4, 3.4, 4.4, kInt4 ? 0.63 : 0.57);
  }
  return error;
}

template <class T, class Weights, int kWarpgroups>
int launch_hundreds(const LinearArguments& a, const fuseline_linear& call, int splits, void* stream) {
  using Shape = Shape65To256<Weights, kWarpgroups>;
  constexpr int kLines = Shape::kTileBytes / 128;
  HundredsCall c{};
  c.a = a;
  c.a.splits = splits;
  c.row_blocks = int(divide_up(a.m, kHundredsRows));
  int code = make_tensor_map(c.x, {a.x, a.k, a.m, 1, a.x_stride, a.x_stride * a.m, kHundredsRows, call.dtype});
  if (code != 0) return code;
  const int64_t a_tile = int64_t(a.chunks) * Shape::kTileBytes;
  code = make_tensor_map(c.weight, {a.weight, 64, int64_t(a.chunks) * kLines, a.tiles, 128, a_tile, kLines, call.dtype, false,
                                    Shape::kBlockTiles});
  if (code != 0) return code;
  const int64_t blocks = divide_up(a.tiles, Shape::kBlockTiles) * c.row_blocks * splits;
  return launch_overlapping(linear_65_to_256_kernel<T, Weights, kWarpgroups>, c, dim3(unsigned(blocks)), Shape::kThreads,
                            size_t(Shape::kShared), splits, stream);
}

// FUSELINE_UNSUPPORTED where the device is no Hopper, for what may stand around the product, and unless asked for where
// linear_tiles.cuh should be faster.
template <class T, class Weights>
int run_hundreds(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  constexpr int kLeastRows = 65, kMostRows = 256;
  const bool asked = call.kernel == FUSELINE_LINEAR_65_TO_256;
  if (!asked && (call.kernel || call.splits)) return FUSELINE_UNSUPPORTED;
  if (a.m < kLeastRows || a.m > kMostRows || a.norm || a.activation || a.residual || a.k == 0 || !a.x_vectors) {
    return FUSELINE_UNSUPPORTED;
  }
  if (Weights::kGrouped && (a.zeros || a.group_shift < 2)) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (!device.warpgroups) return FUSELINE_UNSUPPORTED;
  HundredsPlan plan;
  if (plan_hundreds<T, Weights>(a, device, call.splits, plan) != cudaSuccess) {
    return cudaGetLastError(), FUSELINE_UNSUPPORTED;  // no such kernel for this device
  }
  // What errs least of 472 products: int4 beside 65 rows takes up to a third longer than beside 128, for no known reason.
  const double most = !Weights::kGrouped ? 1.02 : a.m < 96 ? 0.8 : a.m <= 128 ? 1.03 : 1.;
  if (plan.warpgroups == 0 || (!asked && plan.us > most * tiles_us<Weights>(a, device.processors))) return FUSELINE_UNSUPPORTED;
  if (plan.warpgroups == 2) return launch_hundreds<T, Weights, 2>(a, call, plan.splits, stream);
  return launch_hundreds<T, Weights, 3>(a, call, plan.splits, stream);
}

}  // namespace fuseline
