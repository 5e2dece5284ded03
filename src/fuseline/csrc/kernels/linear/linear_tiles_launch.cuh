// The host's half of linear_tiles.cuh.
#pragma once

#include <atomic>
#include <chrono>

#include "linear_tiles.cuh"

namespace fuseline {

// 64 bits that stand nowhere else: a count, mixed with where and when this library was loaded (splitmix64).
inline uint64_t new_token() {
  static std::atomic<uint64_t> count{uint64_t(std::chrono::system_clock::now().time_since_epoch().count()) ^
                                     reinterpret_cast<uintptr_t>(&count)};
  uint64_t z = count += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// Blocks that share a tile as a cluster, by the nanoseconds that the busiest multiprocessor should take; 1 where the run of
// all steps is cut evenly. `clusters_of` answers how many clusters of so many there can be at once: of 8 an H100 has room
// for fewer than 16, of 4 for fewer than 32. The constants were fitted to 90 products of 16 to 256 rows, of which the plan's
// choice takes 0.3% more than the best. 4096 x 4096 in int4, us by 1, 2, 4, 5 and 8 blocks: 14.6, 19.9, 12.7, 12.0, 18.4
// beside 32 rows of x, 28.8, 33.0, 21.3, 20.6, 29.8 beside 128.
//
// Two blocks of a multiprocessor (int8, 32 rows) wait for memory, not for the longest run: what blocks have fewer of, others
// get sooner, and half of the blocks read at 0.6 of all's speed. Clusters of them begin where the launch before has left room,
// which lies scattered: of 5, that would fill more than seven eighths, half had to wait for a second wave. 11008 x 4096, us
// by 1, 3 to 8 blocks: 22 to 23, 26.5, 27.2, 22.7, 21.1, 20.5, 25.7.
template <class Shape, class ClustersOf>
int plan_tiles(const LinearArguments& a, int64_t tiles, int places, const ClustersOf& clusters_of) {
  constexpr bool kTwo = Shape::kBlocks == 2;
  constexpr double kHbm = kTwo ? 11.4 : 22.8, kL2 = kTwo ? 40 : 60, kCluster = 40;  // bytes a nanosecond and block
  constexpr double kProducts = 5000, kUnpacked = 55, kMeeting = kTwo ? 300 : 1000, kOneMore = kTwo ? 350 : 0;
  constexpr double kWeights = Shape::kBlockTiles * Shape::kTileStepBytes, kSums = Shape::kSumBytes;
  constexpr double kFlops = 2. * Shape::kSumBytes / 4 * kStepChunks * kTileColumns;
  constexpr double kRead = (kWeights + Shape::kStageBytes) / kL2;
  constexpr double kStep = std::max({kUnpacked * Shape::kBlockTiles, kFlops / kProducts, kRead});
  const int64_t blocks = std::min<int64_t>(places, tiles * a.steps), steps = divide_up(tiles * a.steps, blocks);
  const int64_t others = divide_up(a.steps - 1, steps);  // that the one who adds waits for
  double best = std::max(kStep, kWeights / kHbm) * steps + kSums / kL2 * (1 + others);
  int splits = 1;
  for (int of = 2; of <= std::min(a.steps, kMostSplits); ++of) {
    const int clusters = std::min(clusters_of(of), (kTwo ? places * 7 / 8 : places) / of);
    if (clusters == 0) continue;
    const int64_t waves = divide_up(tiles, clusters);
    const double busy = std::min(1., double(tiles * of) / (waves * places));
    const double a_step = std::max(kStep, kWeights / kHbm * (kTwo ? 0.25 + 0.75 * busy : busy));
    const double each = kTwo ? double(a.steps) / of : double(divide_up(a.steps, of));
    const double cost = waves * (a_step * each + kMeeting + kOneMore * of + kSums / kCluster);
    if (cost < best) best = cost, splits = of;
  }
  return splits;
}

constexpr int kManyTiles = 4;  // of a block, from which on two share x

template <class T, class Weights, int kRows, bool kAnyGroups>
int launch_tiles(LinearArguments a, const fuseline_linear& call, const Device& device, void* stream) {
  using Shape = TilesShape<Weights, kRows, kAnyGroups>;
  const auto alone = linear_tiles_kernel<T, Weights, kRows, kAnyGroups, Sharing::kNothing>;
  const auto in_cluster = linear_tiles_kernel<T, Weights, kRows, kAnyGroups, Sharing::kTile>;
  a.steps = int(divide_up(a.chunks, kStepChunks));
  const int64_t of_w = divide_up(a.tiles, Shape::kBlockTiles), row_blocks = divide_up(a.m, kRows);
  const int64_t tiles = of_w * row_blocks, units = tiles * a.steps;
  if (units > 0x3fffffff) return FUSELINE_UNSUPPORTED;
  a.y_pairs = a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0;
  const auto clusters_of = [&](int splits) {
    int resident = 0;
    const cudaError_t error = resident_clusters(splits == 1 ? alone : in_cluster, device, Shape::kThreads,
                                                size_t(Shape::kShared), splits, resident);
    if (error == cudaSuccess) return resident;
    cudaGetLastError();
    return 0;  // no machine code for this device
  };
  const int resident = clusters_of(1);
  if (resident == 0) return FUSELINE_UNSUPPORTED;
  // All blocks are there at once, so that those which wait do not wait long.
  int64_t blocks = std::min<int64_t>(std::min(resident, Shape::kBlocks * device.processors), units);
  a.splits = call.splits ? call.splits : plan_tiles<Shape>(a, tiles, int(blocks), clusters_of);
  auto kernel = a.splits > 1 ? in_cluster : alone;
  int cluster = a.splits;
  if constexpr (kRows == kMostTiledRows && Weights::kFormat == FUSELINE_WEIGHT_INT8) {
    // 442 us for 480 of 4096 x 128256 in runs so long that power limits the clocks; it is as fast in short ones, with up to
    // 22016 rows of W, and in int4.
    int pairs = 0;
    if (!call.splits && a.splits == 1 && tiles >= kManyTiles * blocks) {
      const auto of_two = linear_tiles_kernel<T, Weights, kRows, kAnyGroups, Sharing::kX>;
      const cudaError_t error = resident_clusters(of_two, device, Shape::kThreads, size_t(Shape::kShared), 2, pairs);
      if (error != cudaSuccess) return int(error);
      if (2 * pairs >= blocks) kernel = of_two, cluster = 2;
    }
  }
  if (a.splits > 1) {
    if (a.splits > std::min(a.steps, kMostSplits) || clusters_of(a.splits) == 0) return FUSELINE_UNSUPPORTED;
    blocks = tiles * a.splits;
  } else {
    const int64_t runs = blocks / cluster, steps = divide_up(of_w, cluster) * row_blocks * a.steps;
    blocks = runs * cluster;
    a.base = int(steps / runs), a.extra = int(steps % runs);
    a.flags = reinterpret_cast<uint64_t*>(a.workspace + tiled_x_bytes(a.m, a.k));
    a.token = new_token();
    a.partials = reinterpret_cast<char*>(a.flags) + tiled_flag_bytes(device.processors);
  }
  if constexpr (Shape::kBlocks == 2) {  // which fit together only where nearly all memory of a multiprocessor is shared
    static thread_local int asked[2] = {-1, -1};
    const bool shares = a.splits > 1;
    if (asked[shares] != device.index) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      if (error != cudaSuccess) return int(error);
      asked[shares] = device.index;
    }
  }
  constexpr int kUntilX = 1500 * 22;  // nanoseconds, of so many bytes of a multiprocessor each
  constexpr bool kAsked = Shape::kRing > 0;  // for more than that
  a.prefetched = kAsked ? 0 : int(divide_up(kUntilX, Shape::kBlockTiles * Shape::kTileStepBytes));
  a.ordered = Shape::kUnordered == 0 || !a.x_vectors;
  if (a.ordered) {
    const int error = launch_order_x(a, kRows, stream);
    if (error != 0) return error;
    a.overlap = true;  // that launch lets this one start when its weights stand
  }
  return launch_overlapping(kernel, a, dim3(unsigned(blocks)), Shape::kThreads, size_t(Shape::kShared), cluster, stream);
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
    case 128: return launch_tiles<T, Weights, 128, kAnyGroups>(a, call, device, stream);
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
