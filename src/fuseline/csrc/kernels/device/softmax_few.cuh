// How softmax lays out rows so few that all their threads run at once.
#pragma once

#include "launch.cuh"

namespace fuseline {

// Rows of a few warps, no more of them than multiprocessors, have a vector a thread: 4 x 1,024 elements of 16 bits 1.64
// us, 128 x 1,024 1.93, and in a warp that holds four vectors 1.73 and 1.99; 512 rows 6.05, and 2.91.
inline RowPlan plan_few_softmax(int64_t rows, int64_t vectors, int held_by_warp, const Device& device) {
  const bool few_warps = vectors > kWarp && vectors <= int64_t(held_by_warp) * kWarp;
  if (few_warps && rows <= device.processors) return plan_spread(rows, vectors, 1, 1, 1, device);
  return plan_few(rows, vectors, held_by_warp, device);
}

}  // namespace fuseline
