// How short rows that pass through shared memory several at a time (device/tiled.cuh) are laid out.
#pragma once

#include "device.h"

namespace fuseline {

constexpr int kTileBlock = 256;
constexpr int kTileBytes = 16384;
constexpr int kLongestTiled = 1024;

// Elements of a row that a thread has at most.
constexpr int kFewTiled = 8, kManyTiled = 32;

struct Tiling {
  int threads = 0;  // of a row; 0: such rows are not tiled
  int rows = 0;     // of a block
  size_t bytes = 0;
  int64_t grid = 0;
};

inline LaunchShape shape_of(const Tiling& tiles) {
  return {tiles.grid, tiles.threads, kTileBlock / tiles.threads, 1, tiles.bytes};
}

// `offsets`: of all tensors into their 16 bytes, together.
inline Tiling plan_tiles(int element_size, int64_t rows, int64_t n, int offsets, int tensors, const Device& device) {
  Tiling plan;
  if (!device.clusters || n > kLongestTiled || n % (16 / element_size) == 0 || offsets != 0) return plan;
  const int each = n <= kWarp * kFewTiled ? kFewTiled : kManyTiled;
  plan.threads = power_of_two_from(divide_up(n, each));
  const int at_once = kTileBlock / plan.threads;  // 8 and more: whole vectors
  const int64_t room = kTileBytes / (at_once * n * element_size);
  const int64_t spread = rows / (int64_t(at_once) * 4 * device.processors);
  plan.rows = at_once * int(std::max<int64_t>(1, std::min(room, spread)));
  plan.bytes = size_t(divide_up(plan.rows * n * element_size, 16) * 16 * tensors);
  plan.grid = divide_up(rows, plan.rows);
  return plan;
}

// Rows of whole vectors, more than a warp has lanes, that do not end with the lines of the cache: a warp that reads and
// writes them touches a line more at each step, a block that brings neighbours of them at once only at its ends. Few rows
// are not worth it. Softmax forward, share of the copy bandwidth by blocks of 8, 16, 24 rows: of 2,000 bytes 0.979, 0.967,
// 0.961; of 4,000 0.972, 0.958, 0.957; of 1,200 0.895, 0.975, 0.968.
inline Tiling plan_vector_tiles(int element_size, int64_t rows, int64_t n, int most_held, int tensors, const Device& device) {
  Tiling plan;
  constexpr int kLine = 128, kWideRow = 1920, kFewRows = 128;
  const int64_t bytes = n * element_size, vectors = bytes / 16;
  if (!device.clusters || bytes % kLine == 0 || vectors <= kWarp || vectors > most_held * kWarp) return plan;
  if (rows < int64_t(kFewRows) * device.processors) return plan;
  plan.threads = kWarp, plan.rows = bytes < kWideRow ? 16 : 8;
  plan.bytes = size_t(plan.rows * bytes * tensors);
  plan.grid = divide_up(rows, plan.rows);
  return plan;
}

}  // namespace fuseline
