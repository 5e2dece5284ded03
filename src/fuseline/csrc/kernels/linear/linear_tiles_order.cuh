// x in the order in which the products of linear_tiles.cuh read it, zeros past its columns: for each block of `rows` rows
// and each chunk of 64 columns [8 columns of the product's k][row][16 bytes], two chunks a step.
//
// Of a half chunk of 32 columns lane q of the weights has the eight from 8 q on; words of them go to columns 2 q of the
// product's eights 0, 1, 2 and 3. Rows past the last are never written: nobody reads their sums.
//
// The workspace has x in that order, if the product does not order it itself, then a flag for each block, then what blocks
// leave to each other. Nobody lowers flags before a launch, which would take another one: a flag is up that has the launch's
// token, 64 bits that no other call has, and who has waited for it lowers it.
#pragma once

#include "linear_x.cuh"

namespace fuseline {

constexpr int kMostTiledRows = 256;
constexpr int64_t kSumBytes = 128 * 1024;  // of a multiprocessor, at most

// Rows of x in a block.
inline int tiled_rows(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : m <= 128 ? 128 : kMostTiledRows; }

inline int64_t tiled_x_bytes(int64_t m, int64_t k) {
  const int rows = tiled_rows(m);
  return divide_up(m, rows) * rows * divide_up(k, 2 * kTileColumns) * 2 * kTileColumns * 2;
}

// For one block a multiprocessor or two with half of the sums each.
inline int64_t tiled_flag_bytes(int processors) { return divide_up(processors, 16) * 256; }

inline int64_t tiled_bytes(int64_t m, int64_t k, int processors) {
  return tiled_x_bytes(m, k) + tiled_flag_bytes(processors) +
         processors * std::min<int64_t>(kSumBytes, tiled_rows(m) * 1024);
}

int launch_order_x(const LinearArguments& a, int rows, void* stream);  // linear_tiles_order.cu

}  // namespace fuseline
