// How the threads of elementwise kernels are laid over tensors (device/elementwise.cuh).
#pragma once

#include "device.h"

namespace fuseline {

constexpr int kElementwiseBlock = 256;
constexpr int kLeastBlock = 64;

struct WalkPlan {
  int64_t positions = 0;     // accesses in a row
  int64_t groups = 0;        // of rows, one for each thread of a position
  int64_t row_elements = 0;
  int64_t elements = 0;      // of all rows; the last row may end early
  int64_t row_factor = 1;    // a group starts at row group * row_factor,
  int64_t row_step = 1;      // and its rows stand this far apart
};

// `wide`: elements of an access. Where there are too few rows to fill the device with `rows_a_thread`, a thread gets one.
inline WalkPlan plan_walk(int64_t elements, int64_t row_elements, int wide, int rows_a_thread, const Device& device) {
  WalkPlan walk;
  walk.elements = elements, walk.row_elements = row_elements, walk.positions = row_elements / wide;
  const int64_t rows = divide_up(elements, row_elements);
  const bool few = walk.positions * rows < int64_t(rows_a_thread) * kElementwiseBlock * device.processors * 2;
  walk.row_factor = few ? 1 : rows_a_thread;
  walk.row_step = few ? rows : 1;
  walk.groups = divide_up(rows, walk.row_factor);
  return walk;
}

// Threads of a block: fewer where so many multiprocessors would otherwise be without one.
inline int block_for(int64_t threads, const Device& device) {
  int block = kElementwiseBlock;
  while (block > kLeastBlock && 2 * divide_up(threads, block) <= device.processors) block /= 2;
  return block;
}

inline LaunchShape shape_of(const WalkPlan& walk, const Device& device) {
  const int64_t threads = walk.groups * walk.positions;
  const int block = block_for(threads, device);
  return {divide_up(threads, block), block, 1, 1, 0};
}

}  // namespace fuseline
