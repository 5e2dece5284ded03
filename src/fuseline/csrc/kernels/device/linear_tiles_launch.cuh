// The host's half of linear_tiles.cuh.
#pragma once

#include "linear_tiles.cuh"
#include "linear_tiles_order.cuh"

namespace fuseline {

// How many blocks share the columns, by the nanoseconds that all should take; 0 if not so many as are asked for can.
inline int split_tiles(const LinearArguments& a, const fuseline_linear& call, int rows, const Device& device) {
  constexpr double kEnds = 4500;  // of a block, in nanoseconds
  const double a_chunk = rows == 32 ? 310 : rows == 64 ? 360 : rows == 128 ? 510 : 840;  // measured
  const int64_t clusters = divide_up(a.n, kBlockRows) * divide_up(a.m, rows);
  double best = 0;
  int best_splits = 0;
  for (int splits = 1; splits <= kMostSplits; ++splits) {
    if (call.splits && call.splits != splits) continue;
    const int64_t chunks = divide_up(a.chunks, splits);
    if (chunks * (splits - 1) >= a.chunks) continue;  // a block would have nothing
    // A cluster is of one part of the device, 16 to 18 multiprocessors: some are left over.
    const int64_t parts = std::max(1, device.processors / 18);
    const int64_t at_once = splits <= 2 ? device.processors / splits : parts * (16 / splits);
    const double cost = divide_up(clusters, at_once) * (chunks * a_chunk + kEnds);
    if (best_splits == 0 || cost < best) best = cost, best_splits = splits;
  }
  return best_splits;
}

template <class T, class Weights, int kRows>
int launch_tiles(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  using Shape = TilesShape<Weights, kRows>;
  const auto kernel = linear_tiles_kernel<T, Weights, kRows>;
  a.splits = split_tiles(a, call, kRows, device);
  if (a.splits == 0) return FUSELINE_UNSUPPORTED;
  a.steps_a_split = int(divide_up(a.chunks, a.splits));
  a.y_fours = a.n % 4 == 0 && reinterpret_cast<uintptr_t>(a.y) % 8 == 0;
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, Shape::kThreads, size_t(Shape::kShared), a.splits, resident);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return FUSELINE_UNSUPPORTED;  // no machine code for this device
  }
  if (resident == 0) return FUSELINE_UNSUPPORTED;
  const int ordered = launch_order_x(a, kRows, stream);
  if (ordered != 0) return ordered;
  cudaLaunchAttribute attributes[2]{};
  attributes[0] = overlapping();
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = unsigned(a.splits);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(divide_up(a.n, kBlockRows) * a.splits), unsigned(divide_up(a.m, kRows)));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = size_t(Shape::kShared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = a.splits > 1 ? 2 : 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

// FUSELINE_UNSUPPORTED where the device is no Hopper, and for what stands around the product of few rows.
template <class T, class Weights>
int run_tiles(const LinearArguments& a, const fuseline_linear& call, void* stream);

#define FUSELINE_TILES_KERNELS(T, Weights)                                                                       \
  template <>                                                                                                    \
  int run_tiles<T, Weights>(const LinearArguments& a, const fuseline_linear& call, void* stream) {               \
    if (a.norm || a.halves || a.k == 0 || !a.workspace) return FUSELINE_UNSUPPORTED;                             \
    Device device;                                                                                               \
    const cudaError_t error = current_device(device);                                                            \
    if (error != cudaSuccess) return int(error);                                                                 \
    if (!device.clusters) return FUSELINE_UNSUPPORTED;                                                           \
    switch (tiled_rows(a.m)) {                                                                                   \
      case 32: return launch_tiles<T, Weights, 32>(a, call, device, stream);                                     \
      case 64: return launch_tiles<T, Weights, 64>(a, call, device, stream);                                     \
      case 128: return launch_tiles<T, Weights, 128>(a, call, device, stream);                                   \
      default: return launch_tiles<T, Weights, 256>(a, call, device, stream);                                    \
    }                                                                                                            \
  }

}  // namespace fuseline
