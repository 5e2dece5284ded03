// How the threads of kernels that hold rows in registers are laid out.
#pragma once

#include "rows/choice.h"
#include "device.h"

namespace fuseline {

// How the threads of a kernel that holds its rows in registers are laid out.
struct RowPlan {
  int held = 0;            // 16-byte vectors a thread holds
  int threads = 0;         // that share a row, in one block
  bool one_warp = false;   // and are of one warp
  int rows = 1;            // that a block has at a time
  int cluster = 1;         // blocks that share a row
  int stages = 0;          // rows ahead, if the blocks stay and take row after row
  bool fits = true;        // false: an override asks for what cannot be
  bool streamed = false;   // the row does not fit: read it in pieces, and once more to write
};

// Whether the chip has room for so many threads.
inline bool at_once(int64_t threads, const Device& device) { return threads <= int64_t(device.processors) * 1024; }

// Rows of no more threads than a warp: whole warps of them to a block of at most `block` threads, and few rows spread
// over all multiprocessors rather than stacked on some.
inline void share_warps(RowPlan& plan, int64_t threads, int block, int64_t rows, const Device& device) {
  plan.one_warp = true;
  plan.threads = power_of_two_from(threads);
  const int a_warp = kWarp / plan.threads;
  const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
  plan.rows = int(std::min<int64_t>(std::max(block, kWarp) / plan.threads, spread));
}

// The layout of `rows` rows of n elements: the table's, or the one to be measured. Blocks that do not stay hold 1 or
// `most_held` vectors a thread of rows that do not keep to 16-byte steps, and `most_held` of long rows whose blocks may
// not stay.
inline RowPlan plan_rows(fuseline_family family, int element_size, int64_t rows, int64_t n, bool aligned, bool may_stay,
                         int most_held, const Device& device) {
  RowPlan plan;
  const int size = 16 / element_size;
  const int64_t vectors = aligned ? n / size : divide_up(n + size - 1, size);
  const bool measuring = row_overrides[family].given;
  const RowChoice* choice = choice_for(family, element_size, n);
  const bool waits = choice && choice->kernel == RowKernel::copied;  // where that kernel takes the rows
  plan.streamed = !choice || (!waits && (choice->held == 0 || (choice->cluster > 1 && !device.clusters)));
  if (plan.streamed) {
    plan.threads = kMostThreads;
    plan.fits = !measuring;
    return plan;
  }
  int most_threads = std::min(choice->block, kMostThreads);
  plan.held = choice->held, plan.cluster = choice->cluster, plan.stages = choice->stages;
  if (plan.stages > 0 && !may_stay) {
    plan.held = most_held, plan.cluster = 1, plan.stages = 0, most_threads = kMostThreads;
    while (device.clusters && plan.cluster < kMaxCluster &&
           vectors > int64_t(plan.held) * plan.cluster * kMostThreads) {
      plan.cluster *= 2;
    }
  }
  if (!aligned && plan.stages == 0) plan.held = vectors <= kWarp ? 1 : most_held;
  const auto threads_for = [&](int cluster) { return divide_up(vectors, int64_t(plan.held) * cluster); };
  if (plan.stages > 0 && !measuring && device.clusters) {  // few rows: more blocks for each
    while (plan.cluster < kMaxCluster && rows * plan.cluster * 2 <= device.processors &&
           threads_for(plan.cluster) >= 4 * kWarp) {
      plan.cluster *= 2;
    }
  }
  const int64_t threads = threads_for(plan.cluster);
  if (threads <= kWarp && plan.cluster == 1 && plan.stages == 0) {
    share_warps(plan, threads, choice->block, rows, device);
    plan.fits = choice->block <= kMostShortRowBlock;
    return plan;
  }
  plan.threads = int(std::min<int64_t>(divide_up(threads, kWarp) * kWarp, kMostThreads));
  const bool held = threads <= most_threads;
  plan.fits = held || !measuring;
  plan.streamed = !held;
  return plan;
}

// Rows that `most_held` vectors of each thread of a cluster hold, spread over the chip: as few vectors a thread as there is
// room for all at once. A thread alone takes as long for four as four threads and their meeting take for one each.
inline RowPlan plan_spread(int64_t rows, int64_t vectors, int least_held, int most_held, int most_cluster,
                           const Device& device) {
  RowPlan plan;
  int64_t threads = 0;
  for (plan.held = least_held; plan.held <= most_held; plan.held *= 2) {
    threads = divide_up(vectors, plan.held);
    plan.cluster = 1;
    while (plan.cluster < most_cluster && threads > int64_t(plan.cluster) * kMostThreads) plan.cluster *= 2;
    plan.fits = threads <= int64_t(plan.cluster) * kMostThreads;
    if (plan.fits && (plan.held == most_held || at_once(rows * threads, device))) break;
  }
  if (threads <= kWarp) {
    share_warps(plan, threads, kShortRowBlock, rows, device);
  } else {
    plan.threads = int(divide_up(divide_up(threads, plan.cluster), kWarp) * kWarp);
  }
  return plan;
}

// The same for rows so few that all their threads run at once; fits is false for more. Measured, in us of softmax: 4 x 128
// elements of 16 bits 1.29 with one vector a thread and 1.38 with two; 128 x 768 1.86 with one and 1.83 in a warp, which
// holds four; 128 x 4,096 3.42, and 3.21 with two; 4 x 16,384 2.77, and 3.14 with two.
inline RowPlan plan_few(int64_t rows, int64_t vectors, int held_by_warp, const Device& device) {
  if (vectors > kWarp && vectors <= int64_t(held_by_warp) * kWarp) {
    RowPlan plan;
    plan.fits = false;
    return plan;
  }
  const int least = vectors > kWarp && vectors <= 2 * kMostThreads ? 2 : 1;
  RowPlan plan = plan_spread(rows, vectors, least, 2, device.clusters ? kMaxCluster : 1, device);
  plan.fits = plan.fits && at_once(rows * plan.threads * plan.cluster, device);
  return plan;
}

// Blocks for all rows. No memory holds rows enough for more than 2^31: short rows come 4 and more to a block.
inline int64_t grid_for(const RowPlan& plan, int64_t rows) { return divide_up(rows, plan.rows) * plan.cluster; }

}  // namespace fuseline
