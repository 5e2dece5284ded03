// How much of a product of linear_tiles.cuh a block has, and which.
#pragma once

#include "linear_tiles_order.cuh"

namespace fuseline {

// `kAnyGroups`: int4 with zero points or groups of fewer than 128 columns.
template <class Weights, int kRows, bool kAnyGroups>
struct TilesShape {
  static constexpr TilesSizes kSizes = tiles_sizes(Weights::kFormat, kRows, kAnyGroups);
  static constexpr bool kRings = kSizes.rings;
  static constexpr int kBlocks = kSizes.blocks, kGroups = kSizes.groups, kWarpTiles = kSizes.warp_tiles;
  static constexpr int kBlockTiles = kSizes.block_tiles(), kMultipliers = kSizes.multipliers(), kThreads = kSizes.threads();
  // Of a thread of the warpgroups that multiply, and of the other. All together no more than at the start.
  static constexpr int kRegisters = kBlocks == 2 ? 104 : kGroups == 4 ? 112 : kRows == 128 ? 232 : 240;
  static constexpr int kOtherRegisters = kRows <= 64 ? 32 : kRows == 128 ? 40 : 24;
  static constexpr int kStageBytes = kSizes.stage_bytes, kStages = kSizes.stages, kUnordered = kSizes.unordered;
  static constexpr int kXBytes = kSizes.x_bytes(), kTileStepBytes = tiled_step_bytes(Weights::kFormat);
  static constexpr int kSumBytes = kBlockTiles * kTileRows * kRows * 4;
  static constexpr bool kScalesSums = Weights::kGrouped && !kAnyGroups && kRows == 32;
  // Steps of weights under way: in shared memory, or in registers, 1 KB (int4) or 2 each for a warp's tile.
  static constexpr int kRing = kSizes.ring, kSlotBytes = kSizes.slot_bytes;
  static constexpr int kAhead = kRings || (kRows == 128 && !Weights::kGrouped) ? 1 : 2;
  static constexpr int kShared = kSizes.shared();
  static_assert(kSumBytes <= kXBytes);

  // The t-th tile of this warp in the block at place `block` of those of W: of two the second is of the block's second half.
  __device__ static __forceinline__ int tile_of(int block, int t) {
    return block * kBlockTiles + t * (kMultipliers / kWarp) + int(threadIdx.x) / kWarp;
  }
};

// Blocks begin in the order of their index. The first has the last steps, so that whoever waits does so for one that began
// before it, whatever else the device has to do.
__device__ __forceinline__ int place_of_block() { return int(gridDim.x) - 1 - int(blockIdx.x); }

// The steps of the block at place `block`, of all tiles' steps.
struct Run {
  int first, end;

  __device__ __forceinline__ Run(const LinearArguments& a, int block)
      : first(block * a.base + min(block, a.extra)), end(first + a.base + (block < a.extra)) {}
};

// Of this block: kInCluster, where the blocks of a cluster share a tile, its part of that tile's.
template <bool kInCluster>
__device__ __forceinline__ Run own_run(const LinearArguments& a) {
  Run run(a, place_of_block());
  if constexpr (kInCluster) {
    const int tile = int(blockIdx.x) / a.splits, rank = int(blockIdx.x) - tile * a.splits;
    run.first = tile * a.steps + a.steps * rank / a.splits;
    run.end = tile * a.steps + a.steps * (rank + 1) / a.splits;
  }
  return run;
}

}  // namespace fuseline
