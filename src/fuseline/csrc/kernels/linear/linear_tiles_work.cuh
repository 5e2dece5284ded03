// How much of a product of linear_tiles.cuh a block has, and which.
#pragma once

#include "linear_tiles_order.cuh"

namespace fuseline {

constexpr int kStepChunks = 2;  // of 64 columns

// How much a block with kRows rows of x holds. `kAnyGroups`: int4 with zero points or groups of fewer than 128 columns.
template <class Weights, int kRows, bool kAnyGroups>
struct TilesShape {
  // Beside few rows weights come through shared memory, which has room for more of them than registers.
  static constexpr bool kRings = kRows == 32 && !kAnyGroups;
  // Of a launch on a multiprocessor.
  static constexpr int kBlocks = kRings && !Weights::kGrouped ? 2 : 1;
  static constexpr int kGroups = kRows <= 64 && kBlocks == 1 ? 4 : 2;  // warpgroups that multiply
  static constexpr int kWarpTiles = kRows == 128 ? 2 : 1;  // of 16 rows of W, one after the other
  static constexpr int kBlockTiles = kGroups * 4 * kWarpTiles;
  static constexpr int kMultipliers = kGroups * 128;
  static constexpr int kThreads = kMultipliers + 128;  // and a warpgroup that brings x and gives them its registers
  // All together no more than at the start.
  static constexpr int kRegisters = kBlocks == 2 ? 104 : kGroups == 4 ? 112 : kRows == 128 ? 232 : 240;
  static constexpr int kOtherRegisters = kRows <= 64 ? 32 : kRows == 128 ? 40 : 24;
  static constexpr int kStageBytes = kRows * kStepChunks * kTileColumns * 2;
  static constexpr int kStages = kRings ? 6 / kBlocks : kRows == 32 ? 12 : kRows == 64 ? 8 : kRows == 128 ? 4 : 3;
  // Steps of x on their way here.
  static constexpr int kUnordered = kRings ? 5 - kBlocks : kRows == 32 ? 6 : kRows == 64 ? 4 : kRows == 128 ? 3 : 0;
  static constexpr int kXBytes = (kStages + kUnordered) * kStageBytes;
  static constexpr int kTileStepBytes = kStepChunks * Weights::kVectors * kWarp * 16;  // of weights, for 16 rows of W
  static constexpr int kSumBytes = kBlockTiles * kTileRows * kRows * 4;
  static constexpr bool kScalesSums = Weights::kGrouped && !kAnyGroups && kRows == 32;
  // Steps of weights under way: in shared memory, with their scales, or in registers, 1 KB (int4) or 2 each for a warp's tile.
  static constexpr int kRing = kRings ? 3 : 0;
  static constexpr int kSlotBytes = kTileStepBytes + (Weights::kGrouped ? kWarp * 4 : 0);
  static constexpr int kAhead = kRings || (kRows == 128 && (kAnyGroups || !Weights::kGrouped)) ? 1 : 2;
  static constexpr int kShared = kXBytes + kRing * (kMultipliers / kWarp) * kSlotBytes;
  static_assert(kSumBytes <= kXBytes);

  // The t-th tile of this warp in the block at place `block` of those of W: of two the second is of the block's second half.
  __device__ static __forceinline__ int tile_of(int block, int t) {
    return block * kBlockTiles + t * (kMultipliers / kWarp) + int(threadIdx.x) / kWarp;
  }
};

// What the blocks of a cluster share: nothing, where each is alone; a tile, of whose columns each has a part; or x, which comes
// at once to two blocks that have the same steps of neighbouring tiles of W.
enum class Sharing { kNothing, kTile, kX };

template <Sharing kSharing>
constexpr int kSharers = kSharing == Sharing::kX ? 2 : 1;  // blocks that have the same steps

// Blocks begin in the order of their index. The first has the last steps, so that whoever waits does so for one that began
// before it, whatever else the device has to do. Those that share x have one place.
template <Sharing kSharing>
__device__ __forceinline__ int place_of_block() {
  return (int(gridDim.x) - 1 - int(blockIdx.x)) / kSharers<kSharing>;
}
template <Sharing kSharing>
__device__ __forceinline__ int rank_of_block() {
  return int(blockIdx.x) % kSharers<kSharing>;
}

// The steps of the block at place `block`, of all tiles' steps.
struct Run {
  int first, end;

  __device__ __forceinline__ Run(const LinearArguments& a, int block)
      : first(block * a.base + min(block, a.extra)), end(first + a.base + (block < a.extra)) {}
};

// Of this block: where clusters share tiles, its part of one tile's.
template <Sharing kSharing>
__device__ __forceinline__ Run own_run(const LinearArguments& a) {
  Run run(a, place_of_block<kSharing>());
  if constexpr (kSharing == Sharing::kTile) {
    const int tile = int(blockIdx.x) / a.splits, rank = int(blockIdx.x) - tile * a.splits;
    run.first = tile * a.steps + a.steps * rank / a.splits;
    run.end = tile * a.steps + a.steps * (rank + 1) / a.splits;
  }
  return run;
}

}  // namespace fuseline
