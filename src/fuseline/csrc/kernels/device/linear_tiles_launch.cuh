// The host's half of linear_tiles.cuh.
#pragma once

#include "linear_tiles.cuh"

namespace fuseline {

template <class T, class Weights, int kRows, bool kAnyGroups>
int launch_tiles(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  using Shape = TilesShape<Weights, kRows, kAnyGroups>;
  const auto kernel = linear_tiles_kernel<T, Weights, kRows, kAnyGroups>;
  a.steps = int(divide_up(a.chunks, kStepChunks));
  const int64_t tiles = divide_up(a.tiles, kBlockTiles) * divide_up(a.m, kRows), units = tiles * a.steps;
  if (units > 0x3fffffff) return FUSELINE_UNSUPPORTED;
  a.y_pairs = a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0;
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, Shape::kThreads, size_t(Shape::kShared), 1, resident);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return FUSELINE_UNSUPPORTED;  // no machine code for this device
  }
  if (resident == 0) return FUSELINE_UNSUPPORTED;
  // All blocks are there at once, so that those which wait do not wait long.
  int64_t blocks = std::min<int64_t>(std::min<int64_t>(resident, device.processors), units);
  if (call.splits) blocks = std::min(blocks, tiles * call.splits);
  a.base = int(units / blocks), a.extra = int(units % blocks);
  a.flags = reinterpret_cast<int*>(a.workspace + tiled_x_bytes(a.m, a.k));
  a.partials = reinterpret_cast<char*>(a.flags) + tiled_flag_bytes(device.processors);
  const int ordered = launch_order_x(a, kRows, int(blocks), stream);
  if (ordered != 0) return ordered;
  return launch_overlapping(kernel, a, dim3(unsigned(blocks)), Shape::kThreads, size_t(Shape::kShared), 1, stream);
}

template <class T, class Weights, bool kAnyGroups>
int launch_tiles(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  if (a.norm || a.activation || a.residual || a.k == 0 || !a.workspace) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (!device.clusters) return FUSELINE_UNSUPPORTED;
  switch (tiled_rows(a.m)) {
    case 32: return launch_tiles<T, Weights, 32, kAnyGroups>(a, call, device, stream);
    case 64: return launch_tiles<T, Weights, 64, kAnyGroups>(a, call, device, stream);
    default: return launch_tiles<T, Weights, kMostTiledRows, kAnyGroups>(a, call, device, stream);
  }
}

// FUSELINE_UNSUPPORTED where the device is no Hopper, and for what may stand around the product of few rows.
template <class T, class Weights>
int run_tiles(const LinearArguments& a, const fuseline_linear& call, void* stream);

#define FUSELINE_TILES_KERNELS(T, Weights)                                                         \
  template <>                                                                                      \
  int run_tiles<T, Weights>(const LinearArguments& a, const fuseline_linear& call, void* stream) { \
    if constexpr (Weights::kGrouped) {                                                             \
      if (a.zeros || a.group_shift < 2) return launch_tiles<T, Weights, true>(a, call, stream);    \
    }                                                                                              \
    return launch_tiles<T, Weights, false>(a, call, stream);                                       \
  }

}  // namespace fuseline
