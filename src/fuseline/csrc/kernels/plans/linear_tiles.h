// Plans of linear layers by products of warpgroups on Hopper: for more rows of activations.
#pragma once

#include "linear_plan.h"

namespace fuseline::linear_plans {

// ---- tiles ----

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
template <class ClustersOf>
int tile_splits(const LinearProblem& p, const TilesSizes& sizes, int rows, int steps, int64_t tiles, int places,
                const ClustersOf& clusters_of) {
  constexpr double kProducts = 5000, kUnpacked = 55, kCluster = 40;
  const bool two = sizes.blocks == 2;
  const double hbm = two ? 11.4 : 22.8, l2 = two ? 40 : 60;  // bytes a nanosecond and block
  const double meeting = two ? 300 : 1000, one_more = two ? 350 : 0;
  const double weights = double(sizes.block_tiles()) * tiled_step_bytes(p.format);
  const double sums = double(sizes.block_tiles()) * kTileRows * rows * 4;
  const double flops = 2. * sums / 4 * kStepChunks * kTileColumns;
  const double a_step = std::max({kUnpacked * sizes.block_tiles(), flops / kProducts, (weights + sizes.stage_bytes) / l2});
  const int64_t blocks = std::min<int64_t>(places, tiles * steps), run = divide_up(tiles * steps, blocks);
  const int64_t others = divide_up(steps - 1, run);  // that the one who adds waits for
  double best = std::max(a_step, weights / hbm) * run + sums / l2 * (1 + others);
  int splits = 1;
  for (int of = 2; of <= std::min(steps, kMostSplits); ++of) {
    const int clusters = std::min(clusters_of(of), (two ? places * 7 / 8 : places) / of);
    if (clusters == 0) continue;
    const int64_t waves = divide_up(tiles, clusters);
    const double busy = std::min(1., double(tiles * of) / (waves * places));
    const double each_step = std::max(a_step, weights / hbm * (two ? 0.25 + 0.75 * busy : busy));
    const double each = two ? double(steps) / of : double(divide_up(steps, of));
    const double cost = waves * (each_step * each + meeting + one_more * of + sums / kCluster);
    if (cost < best) best = cost, splits = of;
  }
  return splits;
}

// Groups of fewer than 128 columns and zero points have a kernel for 32 rows of x alone.
template <class Residents>
bool plan_tiles(LinearPlan& given, const LinearProblem& p, const Device& device, const Residents& residents) {
  const int rows = tiled_rows(p.m);
  if (p.plain() || !p.bf16 || !p.bare() || p.k == 0 || !p.workspace || !device.warpgroups) return false;
  if (p.any_groups() && rows > 32) return false;
  LinearPlan plan = given;
  plan.kernel = LinearKernel::tiles, plan.x_rows = rows, plan.any_groups = p.any_groups(), plan.rows_at_once = int(p.m);
  plan.reason = "products of warpgroups, the tiles divided evenly over the GPU";
  const TilesSizes sizes = tiles_sizes(p.format, rows, plan.any_groups);
  plan.steps = int(divide_up(p.chunks(), kStepChunks));
  const int64_t row_blocks = divide_up(p.m, rows), tiles = divide_up(p.tiles(), sizes.block_tiles()) * row_blocks;
  const int64_t units = tiles * plan.steps;
  if (units > 0x3fffffff) return false;
  const auto clusters_of = [&](int splits) {
    plan.shape = {0, sizes.threads(), 1, splits, size_t(sizes.shared())};
    return residents(plan);
  };
  const int resident = clusters_of(1);
  if (resident == 0) return false;
  // All blocks are there at once, so that those which wait do not wait long.
  int64_t blocks = std::min<int64_t>(std::min(resident, sizes.blocks * device.processors), units);
  plan.splits = p.requested_splits ? p.requested_splits
                                   : tile_splits(p, sizes, rows, plan.steps, tiles, int(blocks), clusters_of);
  if (plan.splits > 1) {
    if (plan.splits > std::min(plan.steps, kMostSplits) || clusters_of(plan.splits) == 0) return false;
    blocks = tiles * plan.splits;
  } else {
    plan.base = int(units / blocks), plan.extra = int(units % blocks);
  }
  constexpr int kUntilX = 1500 * 22;  // nanoseconds, of so many bytes of a multiprocessor each; a ring has asked for more
  plan.prefetched = sizes.ring > 0 ? 0 : int(divide_up(kUntilX, sizes.block_tiles() * tiled_step_bytes(p.format)));
  plan.ordered = sizes.unordered == 0 || !p.x_vectors;
  plan.workspace = size_t(tiled_bytes(p.m, p.k, device.processors));
  plan.shape = {blocks, sizes.threads(), 1, plan.splits, size_t(sizes.shared())};
  given = plan;
  return true;
}

// ---- 65 to 256 rows, few weights ----

constexpr int kSplits65To256[] = {1, 2, 3, 4, 6, 8};

// What tiles take, give or take 7%: fitted to 236 products of 65 to 256 rows in either format, 768 to 14336 columns and 512 to
// 28672 rows of W. A block has a run of all tiles' steps, and who begins a tile adds the others' sums; or a cluster shares a
// tile.
inline double tiles_us(const LinearProblem& p, int processors) {
  const bool many = p.m > kRows65To256;
  const double around = many ? 9.2 : 7.8, a_step = many ? 1.48 : 1.7, another = many ? 1.9 : p.int4() ? 1.6 : 3.3;
  const double shared = many ? 0.3 : 0.6;
  const int64_t tiles = divide_up(p.tiles(), many ? 8 : 16), steps = divide_up(p.chunks(), kStepChunks);
  const int64_t run = divide_up(tiles * steps, processors);
  double us = around + a_step * run + another * divide_up(steps - 1, run);
  for (int splits = 2; splits <= std::min<int64_t>(steps, kMostSplits); ++splits) {
    const int64_t clusters = processors * (splits == 2 ? 16 : 15) / 16 / splits;
    const int64_t waves = divide_up(tiles, std::max<int64_t>(clusters, 1));
    us = std::min(us, waves * (around + shared + a_step * divide_up(steps, splits)));
  }
  return us;
}

struct Around65To256 {
  int warpgroups, most_splits;
  double around, shares, a_step;  // microseconds
};

// The best for blocks that all run at once, times give or take 8%; none unless asked for where tiles should be faster.
template <class Residents>
bool plan_65_to_256(LinearPlan& given, const LinearProblem& p, const Device& device, const Residents& residents) {
  constexpr int kLeastRows = 65, kMostRows = 256;
  const bool asked = p.requested == FUSELINE_LINEAR_65_TO_256;
  if (!asked && (p.requested || p.requested_splits)) return false;
  if (!p.bf16 || p.m < kLeastRows || p.m > kMostRows || !p.bare() || p.k == 0 || !p.x_vectors || p.any_groups() ||
      !device.warpgroups) {
    return false;
  }
  const Around65To256 kernels[] = {{2, 8, 2.7, 2.9, p.int4() ? 0.52 : 0.41}, {3, 4, 3.4, 4.4, p.int4() ? 0.63 : 0.57}};
  LinearPlan plan = given, best = given;
  plan.kernel = LinearKernel::few_weights, plan.rows_at_once = int(p.m);
  plan.reason = "few weights: larger tiles, all of them at once, whose sums meet in clusters";
  double best_us = 0;
  for (const Around65To256& kernel : kernels) {
    const Sizes65To256 sizes = sizes_65_to_256(p.format, kernel.warpgroups);
    const int64_t tiles = divide_up(p.tiles(), sizes.block_tiles) * divide_up(p.m, kRows65To256);
    plan.warpgroups = kernel.warpgroups;
    for (const int splits : kSplits65To256) {
      if (splits > p.chunks() || (p.requested_splits ? p.requested_splits != splits : splits > kernel.most_splits)) continue;
      plan.splits = splits;
      plan.shape = {tiles * splits, sizes.threads, 1, splits, size_t(sizes.shared())};
      const int clusters = residents(plan);
      if (clusters == 0 || (tiles > clusters && !p.requested_splits)) continue;
      const double each = kernel.around + (splits > 1 ? kernel.shares : 0) + kernel.a_step * divide_up(p.chunks(), splits);
      const double us = each * divide_up(tiles, clusters);
      if (best_us == 0 || us < best_us) best = plan, best_us = us;
    }
  }
  // What errs least of 472 products: int4 beside 65 rows takes up to a third longer than beside 128, for no known reason.
  const double most = !p.int4() ? 1.02 : p.m < 96 ? 0.8 : p.m <= 128 ? 1.03 : 1.;
  if (best_us == 0 || (!asked && best_us > most * tiles_us(p, device.processors))) return false;
  given = best;
  return true;
}

}  // namespace fuseline::linear_plans
