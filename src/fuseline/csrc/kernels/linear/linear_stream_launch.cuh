// The host's half of linear_stream.cuh: which kernel, and how many blocks share the columns.
#pragma once

#include "linear_stream.cuh"

namespace fuseline {

// Deals `a.tiles` to clusters of `splits` blocks, `clusters` of them at most. Answers the bytes of shared memory.
template <class Shape>
int deal_units(LinearArguments& a, int splits, int clusters) {
  const int grain = a.halves && Shape::kTiles == 1 ? 2 : 1;
  const int grains = int(divide_up(a.tiles, Shape::kTiles * grain));
  a.splits = splits, a.units = std::min(grains, std::max(1, clusters));
  a.base = grains / a.units, a.extra = grains % a.units;
  a.steps = int(divide_up(a.chunks, Shape::kChunks));
  a.steps_a_split = int(divide_up(a.steps, splits));
  const int most_tiles = (a.base + (a.extra > 0)) * grain * Shape::kTiles;
  const int rows = a.m == 1 && splits == 1 && a.norm != FUSELINE_NORM_NONE ? 2 : a.m;  // load_normed_row
  const int64_t x = int64_t(rows) * x_pitch(a.steps_a_split * Shape::kChunks);
  const int64_t sums = int64_t(most_tiles + Shape::kWarps * Shape::kTiles) * a.m * kPitch * 4 + most_tiles * kTileRows * 8;
  // A slice may begin and end within a group.
  a.groups_a_slice = Shape::kStagesScales ? int(divide_up(a.steps_a_split, 1 << (a.group_shift - 2))) + 1 : 0;
  const int64_t scales = int64_t(most_tiles) * a.groups_a_slice * 32;
  a.scale_bytes = int(std::min<int64_t>(scales, 1 << 24)), a.x_bytes = int(std::min<int64_t>(x + scales, 1 << 24));
  return int(std::min<int64_t>(x + scales + sums, 1 << 24));
}

// Two blocks a multiprocessor that have all columns, where each still has enough to do: 32.7 us in place of 34.8 for
// 4096 x 22016 in int8, 19.7 in place of 20.6 in int4; a multiprocessor's 64 KB of 4096 x 4096 in int4 go better to one.
template <class Weights, int kColumnBlocks>
bool two_blocks(const LinearArguments& a, const Device& device) {
  constexpr int64_t kEnough = 96 * 1024;
  const int64_t weights = int64_t(a.tiles) * a.chunks * (Weights::kVectors * kWarp * 16);
  return kColumnBlocks == 1 && device.clusters && weights >= kEnough * device.processors;
}

// By the nanoseconds that the busiest multiprocessor should take. Answers 0 if x fits no way.
template <class Weights, int kColumnBlocks, class Shape>
int plan_stream(const LinearArguments& given, const fuseline_linear& call, const Device& device) {
  constexpr double kHbm = 22.8;     // bytes a nanosecond and multiprocessor
  constexpr double kMeeting = 1500;  // of two blocks, and again of twice as many
  double best = 0;
  int best_splits = 0;
  for (int splits = 1; splits <= (device.clusters ? kMostSplits : 1); splits *= 2) {
    if (call.splits && call.splits != splits) continue;
    LinearArguments a = given;
    const int shared = deal_units<Shape>(a, splits, device.processors / splits);
    if (shared > device.shared_a_block || a.steps_a_split * (splits - 1) >= a.steps) continue;
    const double step = Shape::kTiles * Shape::kVectors * kWarp * 16.;
    const double most = a.base + (a.extra > 0), mean = double(a.base * a.units + a.extra) * splits / device.processors;
    const int grain = a.halves && Shape::kTiles == 1 ? 2 : 1;
    // Blocks that are done leave the bandwidth to the others, and a second block that has less to do even more so: whole
    // columns of 7000 x 7000 in int8 take 17.7 us, halves 21.1.
    const bool fit = splits == 1 && grain == 1 && 2 * shared <= device.shared_a_block;
    const bool two = fit && two_blocks<Weights, kColumnBlocks>(a, device);
    double cost = (two ? 2 * mean + most : mean + 2 * most) / 3 * grain * a.steps_a_split * step / kHbm;
    for (int of = splits; of > 1; of /= 2) cost += kMeeting;
    if (best_splits == 0 || cost < best) best = cost, best_splits = splits;
  }
  return best_splits;
}

template <class T, class Weights, int kColumnBlocks, bool kAnyGroups>
int launch_stream(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  using Shape = StreamShape<Weights, kColumnBlocks, kAnyGroups>;
  const auto kernel = linear_stream_kernel<T, Weights, kColumnBlocks, kAnyGroups>;
  const int splits = plan_stream<Weights, kColumnBlocks, Shape>(a, call, device);
  if (splits == 0) return FUSELINE_UNSUPPORTED;
  const bool two = splits == 1 && two_blocks<Weights, kColumnBlocks>(a, device);
  int clusters = device.processors * (two ? 2 : 1) / splits, shared = 0;
  for (;;) {  // the device may hold fewer clusters than multiprocessors / splits
    shared = deal_units<Shape>(a, splits, clusters);
    if (shared > device.shared_a_block) return FUSELINE_UNSUPPORTED;
    int resident = 0;
    const cudaError_t error = resident_clusters(kernel, device, Shape::kThreads, size_t(shared), splits, resident);
    if (error != cudaSuccess) return int(error);
    if (resident == 0) return FUSELINE_UNSUPPORTED;
    if (resident >= a.units) break;
    clusters = resident;
  }
  // What HBM does until x has come, 22 bytes a nanosecond and multiprocessor, beside the steps under way.
  const double until_x = 1500 + (a.x_bytes - a.scale_bytes) / 40.;
  a.prefetched = Shape::kAhead + std::min(28, int(until_x * 22 / (Shape::kWarps * Shape::kTiles * Shape::kVectors * 512)));
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(a.units * splits));
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (device.clusters) {  // sm_90, which has both
    attributes[0] = overlapping();
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = unsigned(splits);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.numAttrs = splits > 1 ? 2 : 1;
  }
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

template <class T, class Weights, bool kAnyGroups>
int launch_stream(const LinearArguments& a, const fuseline_linear& call, const Device& device, void* stream) {
  if (a.m <= 8) return launch_stream<T, Weights, 1, kAnyGroups>(a, call, device, stream);
  if (a.m <= 16) return launch_stream<T, Weights, 2, kAnyGroups>(a, call, device, stream);
  return launch_stream<T, Weights, 4, kAnyGroups>(a, call, device, stream);
}

// Up to kStreamRows rows of x. FUSELINE_UNSUPPORTED where x does not fit shared memory.
template <class T, class Weights>
int run_stream(const LinearArguments& a, const fuseline_linear& call, void* stream);

#define FUSELINE_STREAM_KERNELS(T, Weights)                                                             \
  template <>                                                                                           \
  int run_stream<T, Weights>(const LinearArguments& a, const fuseline_linear& call, void* stream) {    \
    if (a.m > kStreamRows) return FUSELINE_UNSUPPORTED;                                                 \
    Device device;                                                                                      \
    const cudaError_t error = current_device(device);                                                   \
    if (error != cudaSuccess) return int(error);                                                        \
    if (!a.zeros && (!Weights::kGrouped || a.group_shift >= 2)) {                                       \
      const int answer = launch_stream<T, Weights, false>(a, call, device, stream);                     \
      if (!Weights::kGrouped || answer != FUSELINE_UNSUPPORTED) return answer;                          \
    }                                                                                                   \
    if constexpr (Weights::kGrouped) return launch_stream<T, Weights, true>(a, call, device, stream);   \
    return FUSELINE_UNSUPPORTED;                                                                        \
  }

}  // namespace fuseline
