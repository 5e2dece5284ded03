// How much the blocks of the linear layers' kernels hold, by format of the weight and rows of activations: what plans and kernels
// both go by.
#pragma once

#include "../fuseline_quant.h"
#include "device.h"

namespace fuseline {

constexpr int kTileRows = 16;     // of a weight's tile,
constexpr int kTileColumns = 64;  // and columns of it: a chunk
constexpr int kMostSplits = kMaxCluster;
constexpr int kLinearThreads = 256;
constexpr int kLinearWarps = kLinearThreads / kWarp;

// 16-byte vectors of a tile that each lane of a warp holds.
constexpr int tile_vectors(int format) { return format == FUSELINE_WEIGHT_16 ? 4 : format == FUSELINE_WEIGHT_INT8 ? 2 : 1; }
constexpr int tile_bytes(int format) { return tile_vectors(format) * kWarp * 16; }

// Bytes from row to row of activations in shared memory: 64 more than a multiple of 128, so that 16 bytes of each of 8 rows by 4
// quads lie in all banks.
constexpr int kRowGap = 64;

// ---- streams (linear_stream.cuh) ----

constexpr int kStreamRows = 32;        // of x in a launch, at most
constexpr int kPitch = kTileRows + 4;  // floats between rows of x in a plane of sums: banks apart

// What a block and its warps have. `any_groups`: int4 with zero points or groups of fewer than 128 columns.
struct StreamSizes {
  int tiles;           // at a time
  int chunks;          // of 64 columns in a step
  int vectors;         // of 16 bytes of a lane in a step of a tile
  int warps;
  int ahead;           // steps under way; 1 KB each for a warp (2 of 16-bit weights and of two tiles)
  int blocks;          // of a multiprocessor, where launches overlap
  bool stages_scales;  // in shared memory
};

constexpr StreamSizes stream_sizes(int format, int column_blocks, bool any_groups) {
  const bool int4 = format == FUSELINE_WEIGHT_INT4;
  StreamSizes sizes{};
  // Two tiles at a time halve what is read of x from shared memory.
  sizes.tiles = int4 && column_blocks == 4 && !any_groups ? 2 : 1;
  sizes.chunks = int4 ? 2 : 1;
  sizes.vectors = sizes.chunks * tile_vectors(format);
  // Up to 8 rows of x a multiprocessor has room for a block of this launch and one of the next.
  sizes.warps = column_blocks == 2 && !any_groups ? 16 : 12;
  sizes.ahead = format == FUSELINE_WEIGHT_16 || sizes.tiles == 2 ? 2 : any_groups && column_blocks == 1 ? 3 : 4;
  sizes.blocks = column_blocks == 1 ? 2 : 1;
  sizes.stages_scales = int4 && !any_groups;
  return sizes;
}

// ---- slices (linear_slices.cuh) ----

constexpr int kSliceWarps = 16;  // of a block, at most

// Chunks of a step: 1 KB of a tile.
constexpr int slice_chunks(int format) { return format == FUSELINE_WEIGHT_INT4 ? 2 : 1; }

// ---- tiles (linear_tiles.cuh) ----

constexpr int kStepChunks = 2;  // of 64 columns
constexpr int kMostTiledRows = 256;

// What a block has beside `rows` rows of x.
struct TilesSizes {
  bool rings;        // weights come through shared memory, which has room for more of them than registers
  int blocks;        // of a launch on a multiprocessor
  int groups;        // warpgroups that multiply
  int warp_tiles;    // of 16 rows of W, one after the other
  int stage_bytes;   // of a step of x
  int stages;
  int unordered;     // steps of x on their way here
  int slot_bytes;    // of a step of weights of a warp's tile and their scales
  int ring;          // such steps under way in shared memory
  constexpr int block_tiles() const { return groups * 4 * warp_tiles; }
  constexpr int multipliers() const { return groups * 128; }
  constexpr int threads() const { return multipliers() + 128; }  // and a warpgroup that brings x and gives them its registers
  constexpr int x_bytes() const { return (stages + unordered) * stage_bytes; }
  constexpr int shared() const { return x_bytes() + ring * (multipliers() / kWarp) * slot_bytes; }
};

constexpr int tiled_step_bytes(int format) { return kStepChunks * tile_bytes(format); }  // of weights, for 16 rows of W

constexpr TilesSizes tiles_sizes(int format, int rows, bool any_groups) {
  const bool int4 = format == FUSELINE_WEIGHT_INT4;
  TilesSizes sizes{};
  sizes.rings = rows == 32 && !any_groups;
  sizes.blocks = sizes.rings && !int4 ? 2 : 1;
  sizes.groups = rows <= 64 && sizes.blocks == 1 ? 4 : 2;
  sizes.warp_tiles = rows == 128 ? 2 : 1;
  sizes.stage_bytes = rows * kStepChunks * kTileColumns * 2;
  sizes.stages = sizes.rings ? 6 / sizes.blocks : rows == 32 ? 12 : rows == 64 ? 8 : rows == 128 ? 4 : 3;
  sizes.unordered = sizes.rings ? 5 - sizes.blocks : rows == 32 ? 6 : rows == 64 ? 4 : rows == 128 ? 3 : 0;
  sizes.slot_bytes = tiled_step_bytes(format) + (int4 ? kWarp * 4 : 0);
  sizes.ring = sizes.rings ? 3 : 0;
  return sizes;
}

// Rows of x in a block.
inline int tiled_rows(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : kMostTiledRows; }

// The workspace: x in the order of the products, a flag for each block, and the sums that blocks leave to each other, for one
// block a multiprocessor or two with half of the sums each.
inline int64_t tiled_x_bytes(int64_t m, int64_t k) {
  const int rows = tiled_rows(m);
  return divide_up(m, rows) * rows * divide_up(k, kStepChunks * kTileColumns) * kStepChunks * kTileColumns * 2;
}
inline int64_t tiled_flag_bytes(int processors) { return divide_up(processors, 16) * 256; }
inline int64_t tiled_bytes(int64_t m, int64_t k, int processors) {
  constexpr int64_t kMostSums = 128 * 1024;  // of a multiprocessor
  return tiled_x_bytes(m, k) + tiled_flag_bytes(processors) +
         processors * std::min<int64_t>(kMostSums, tiled_rows(m) * 1024);
}

// ---- 65 to 256 rows (linear_65_to_256.cuh) ----

constexpr int kRows65To256 = 128;  // of x in a block

struct Sizes65To256 {
  int block_tiles;  // of 16 rows of W
  int threads;
  int stage_bytes, stages;
  constexpr int shared() const { return stages * stage_bytes + 1024; }
};

constexpr Sizes65To256 sizes_65_to_256(int format, int warpgroups) {
  Sizes65To256 sizes{};
  sizes.block_tiles = warpgroups * 4;
  sizes.threads = warpgroups * 128 + 128;  // and a warpgroup that fetches and gives the others its registers
  sizes.stage_bytes = kRows65To256 * 128 + sizes.block_tiles * tile_bytes(format);
  sizes.stages = (226 * 1024 - 256) / sizes.stage_bytes;
  return sizes;
}

}  // namespace fuseline
