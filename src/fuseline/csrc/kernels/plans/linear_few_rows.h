// Plans of linear layers for up to 32 rows of activations, and for more some at a time.
#pragma once

#include "linear_plan.h"

namespace fuseline::linear_plans {

// ---- one to four rows, 16-bit weights ----

constexpr int kMostGemvShared = 96 * 1024;  // of x, so that two blocks fit
constexpr int kOfTwo = 86 * 1024;           // of a block's, so that two fit a multiprocessor and no third

// Two rows a warp fill a GPU's places from 44 rows a multiprocessor on. With less, some multiprocessors get three of the
// blocks that begin as the launch before ends, and others one: 4096 x 4096 takes 12.2 us in two blocks a multiprocessor for
// 14.1 in three; beyond as many rows teams of four even out what is left. Long rows go to whole blocks, of any number: 31.2
// for 37.1 us of 11008 x 4096, 33.9 for 35.9 of 7000 x 7000. Of few rows short ones are better dealt among two warps 512
// bytes in turn (1000 x 1000: 2.1 for 2.8), longer ones in halves (3000 x 3000: 7.0 for 7.4), and where every warp of two
// blocks a multiprocessor has one row, nothing is shared (2000 x 2000: 4.0 for 5.4).
struct GemvChoice {
  int team;  // warps that share a row of W
  int rows;  // of W that a warp has, where none does; one is shared by two
  bool two;  // blocks a multiprocessor
};

inline GemvChoice choose_gemv(const LinearProblem& p, const Device& device) {
  const int few = 24 * device.processors, of_two = 32 * device.processors, enough = 44 * device.processors;
  if (p.swiglu) return {0, 2, false};
  const bool one_each = p.m == 1 && p.n > 12 * device.processors && p.n <= 16 * device.processors;
  if (one_each && device.clusters && p.k > 1536 && p.k <= 2048) return {1, 1, true};
  if (p.n < few) return {p.k < 2048 ? 2 : 0, 1, false};
  if (p.m > 1) return {0, 2, false};
  if (p.k > 6144) return {8, 1, false};
  if (p.n <= of_two) return {0, 2, device.clusters};
  return {p.n < enough ? 4 : 0, 2, false};
}

template <class Residents>
bool plan_gemv(LinearPlan& plan, const LinearProblem& p, const Device& device, const Residents& residents) {
  const int rows = p.m <= 2 ? int(p.m) : 4;
  if (p.m > 4 || !p.x_vectors || !p.weight_vectors || p.k == 0 || rows * p.k * 2 > kMostGemvShared) return false;
  const GemvChoice choice = choose_gemv(p, device);
  plan.kernel = choice.team ? LinearKernel::gemv_team : LinearKernel::gemv;
  plan.reason = choice.team ? "few rows of 16-bit weights: warps share each of the weight's rows"
                            : "few rows of 16-bit weights: each warp has rows of the weight";
  plan.x_rows = rows, plan.team = choice.team, plan.weight_rows = choice.rows;
  const size_t x = size_t(rows) * p.k * 2;
  plan.shape = {0, kLinearThreads, 1, 1, choice.two ? std::max<size_t>(x, kOfTwo) : x};
  const int64_t at_once = choice.team ? kLinearWarps / choice.team  // rows of a block
                          : choice.rows == 1 ? kLinearWarps / 2
                                             : 2 * kLinearWarps;
  plan.shape.grid = std::min<int64_t>(divide_up(p.n, at_once), std::max(1, residents(plan)));
  return true;
}

// ---- one row, few quantized weights ----

// int8: halves of tiles where all of them have room at once, three blocks to a multiprocessor or, of fewer registers, four;
// quarters of more. Us by halves, quarters and streams: 1000 x 1000 1.26, 1.34, 2.80; 2000 x 2000 2.38, 2.17, 3.46; 3000 x 3000
// 4.13, 4.62, 6.42; 1024 x 4096 2.17, 2.42, 3.54; 2048 x 4096 3.80, 4.20, 4.09; 4096 x 4096 -, 6.58, 7.49; 5000 x 5000 9.35,
// 10.03, 9.38.
// int4: halves of few tiles, then whole ones while two blocks a multiprocessor hold them all, then halves again, as long as half
// of the six steps are not idle. Us by whole tiles, halves, quarters and streams: 1000 x 1000 1.79, 1.43, 1.45, 2.74; 2000 x 2000
// 2.25, 2.10, 1.97, 3.19; 3000 x 3000 3.13, 3.03, 3.73, 4.32; 4096 x 4096 4.69, 5.17, 5.09, 5.18; 4096 x 6144 6.85, 6.59, 6.86,
// 7.68; 5000 x 5000 -, 7.62, 8.54, 8.27; 6000 x 6000 -, 9.18, 10.11, 10.03; 4104 x 6000 -, 8.29, 9.49, 8.11.
// Answers the parts of a tile, 0 for none.
inline int tile_parts(const LinearProblem& p, const Device& device) {
  const int tiles = p.tiles(), chunks = p.chunks();
  if (!p.int4()) {
    const int at_once = (chunks <= 32 ? 4 : 3) * device.processors;
    if (2 * tiles <= at_once && chunks <= 48) return 2;
    return 4 * tiles <= 8 * device.processors ? 4 : 0;
  }
  const int three = 3 * device.processors;
  if (p.zeros || p.group_shift < 1 || tiles > three) return 0;
  if (2 * tiles > three && tiles <= 2 * device.processors && chunks <= 64) return 1;
  return chunks > 64 && chunks <= 72 ? 0 : 2;
}

inline bool plan_gemv_quantized(LinearPlan& plan, const LinearProblem& p, const Device& device) {
  if (p.m != 1 || !p.bf16 || p.k == 0 || !p.x_vectors || !p.bare() || p.next_weight) return false;
  const int parts = tile_parts(p, device);
  if (parts == 0) return false;
  const int64_t pieces = divide_up((p.int4() ? 1 : 2) * p.chunks(), parts * kLinearWarps);
  if (pieces > (parts == 1 ? 8 : parts == 2 ? 6 : 4)) return false;
  plan.kernel = LinearKernel::gemv_quantized;
  plan.reason = "one row and so few weights that all of them are on their way at once";
  plan.tile_parts = parts, plan.pieces = pieces > 6 ? 8 : pieces > 4 ? (parts == 1 ? 8 : 6) : pieces > 2 || parts != 2 ? 4 : 2;
  plan.shape = {int64_t(p.tiles()) * parts, kLinearThreads, 1, 1, 0};
  return true;
}

// ---- streams ----

// Deals tiles to clusters of `splits` blocks, `clusters` of them at most. Answers the bytes of shared memory.
inline int64_t deal_units(LinearPlan& plan, const LinearProblem& p, int splits, int clusters) {
  const StreamSizes sizes = stream_sizes(p.format, plan.column_blocks, plan.any_groups);
  const int grain = p.swiglu && sizes.tiles == 1 ? 2 : 1;
  const int grains = int(divide_up(p.tiles(), sizes.tiles * grain));
  plan.splits = splits, plan.units = std::min(grains, std::max(1, clusters));
  plan.base = grains / plan.units, plan.extra = grains % plan.units;
  plan.steps = int(divide_up(p.chunks(), sizes.chunks));
  plan.steps_a_split = int(divide_up(plan.steps, splits));
  const int64_t most_tiles = int64_t(plan.base + (plan.extra > 0)) * grain * sizes.tiles;
  const int64_t rows = p.m == 1 && splits == 1 && p.norm ? 2 : p.m;  // load_normed_row
  const int64_t x = rows * (int64_t(plan.steps_a_split) * sizes.chunks * kTileColumns * 2 + kRowGap);
  const int64_t sums = (most_tiles + sizes.warps * sizes.tiles) * p.m * kPitch * 4 + most_tiles * kTileRows * 8;
  // A slice may begin and end within a group.
  plan.groups_a_slice = sizes.stages_scales ? int(divide_up(plan.steps_a_split, 1 << (p.group_shift - 2))) + 1 : 0;
  plan.scale_bytes = most_tiles * plan.groups_a_slice * 32, plan.x_bytes = x + plan.scale_bytes;
  return plan.x_bytes + sums;
}

// Two blocks a multiprocessor that have all columns, where each still has enough to do: 32.7 us in place of 34.8 for
// 4096 x 22016 in int8, 19.7 in place of 20.6 in int4; a multiprocessor's 64 KB of 4096 x 4096 in int4 go better to one.
inline bool two_blocks(const LinearPlan& plan, const LinearProblem& p, const Device& device) {
  constexpr int64_t kEnough = 96 * 1024;
  const int64_t weights = int64_t(p.tiles()) * p.chunks() * tile_bytes(p.format);
  return plan.column_blocks == 1 && device.clusters && weights >= kEnough * device.processors;
}

// By the nanoseconds that the busiest multiprocessor should take. Answers 0 if x fits no way.
inline int stream_splits(const LinearPlan& of, const LinearProblem& p, const Device& device) {
  constexpr double kHbm = 22.8;      // bytes a nanosecond and multiprocessor
  constexpr double kMeeting = 1500;  // of two blocks, and again of twice as many
  const StreamSizes sizes = stream_sizes(p.format, of.column_blocks, of.any_groups);
  double best = 0;
  int best_splits = 0;
  for (int splits = 1; splits <= (device.clusters ? kMostSplits : 1); splits *= 2) {
    if (p.requested_splits && p.requested_splits != splits) continue;
    LinearPlan plan = of;
    const int64_t shared = deal_units(plan, p, splits, device.processors / splits);
    if (shared > device.shared_a_block || plan.steps_a_split * (splits - 1) >= plan.steps) continue;
    const double step = sizes.tiles * sizes.vectors * kWarp * 16.;
    const double most = plan.base + (plan.extra > 0);
    const double mean = double(plan.base * plan.units + plan.extra) * splits / device.processors;
    const int grain = p.swiglu && sizes.tiles == 1 ? 2 : 1;
    // Blocks that are done leave the bandwidth to the others, and a second block that has less to do even more so: whole
    // columns of 7000 x 7000 in int8 take 17.7 us, halves 21.1.
    const bool fit = splits == 1 && grain == 1 && 2 * shared <= device.shared_a_block;
    const bool two = fit && two_blocks(plan, p, device);
    double cost = (two ? 2 * mean + most : mean + 2 * most) / 3 * grain * plan.steps_a_split * step / kHbm;
    for (int of_two = splits; of_two > 1; of_two /= 2) cost += kMeeting;
    if (best_splits == 0 || cost < best) best = cost, best_splits = splits;
  }
  return best_splits;
}

template <class Residents>
bool plan_stream(LinearPlan& given, const LinearProblem& p, bool any_groups, const Device& device, const Residents& residents) {
  LinearPlan plan = given;
  plan.kernel = LinearKernel::stream, plan.any_groups = any_groups;
  plan.reason = "few rows: each warp reads a stream of weights, and nothing waits but for data";
  plan.column_blocks = p.m <= 8 ? 1 : p.m <= 16 ? 2 : 4, plan.rows_at_once = int(p.m);
  const StreamSizes sizes = stream_sizes(p.format, plan.column_blocks, any_groups);
  const int splits = stream_splits(plan, p, device);
  if (splits == 0) return false;
  const bool two = splits == 1 && two_blocks(plan, p, device);
  for (int clusters = device.processors * (two ? 2 : 1) / splits;;) {  // the device may hold fewer
    const int64_t shared = deal_units(plan, p, splits, clusters);
    if (shared > device.shared_a_block) return false;
    plan.shape = {int64_t(plan.units) * splits, sizes.warps * kWarp, 1, splits, size_t(shared)};
    const int resident = residents(plan);
    if (resident == 0) return false;
    if (resident >= plan.units) break;
    clusters = resident;
  }
  // What HBM does until x has come, 22 bytes a nanosecond and multiprocessor, beside the steps under way.
  const double until_x = 1500 + double(plan.x_bytes - plan.scale_bytes) / 40.;
  plan.prefetched = sizes.ahead + std::min(28, int(until_x * 22 / (sizes.warps * sizes.tiles * sizes.vectors * 512)));
  given = plan;
  return true;
}

// Up to kStreamRows rows of x, if they fit.
template <class Residents>
bool plan_stream(LinearPlan& plan, const LinearProblem& p, const Device& device, const Residents& residents) {
  if (p.m > kStreamRows || !p.weight_vectors) return false;
  if (!p.any_groups() && plan_stream(plan, p, false, device, residents)) return true;
  return p.int4() && plan_stream(plan, p, true, device, residents);
}

// More rows, or those that do not fit, go some at a time.
template <class Residents>
bool plan_streams(LinearPlan& plan, const LinearProblem& p, const Device& device, const Residents& residents) {
  constexpr int kMostStreams = 128;  // rows of x, beyond which the weight is better dequantized
  if (p.m > kMostStreams) return false;
  for (int rows = kStreamRows; rows >= 1; rows /= 2) {
    if (p.m <= rows / 2) continue;
    LinearProblem some = p;
    some.m = std::min<int64_t>(p.m, rows);
    if (plan_stream(plan, some, device, residents)) return true;
  }
  return false;
}

// ---- slices ----

// Of shared memory of a block, for no second one beside it.
inline int64_t least_shared(const Device& device) { return device.shared_a_processor / 2; }

// Where slices were faster than streams and tiles: see docs/experiments/linears.md. Rows of x at odd addresses each block puts in
// order itself, where tiles want a launch ahead for that.
inline bool slices_win(const LinearProblem& p) {
  constexpr int64_t kMi = 1 << 20;
  if (p.weights() < 16 * kMi || p.weights() > 120 * kMi) return false;
  if (p.int4()) return p.m > 8 && p.m <= 16;
  if (p.m > 16) return p.k <= 8192 && p.weights() >= 40 * kMi && p.weights() <= 96 * kMi;
  return p.m > (p.x_vectors ? 4 : 2) && !(p.m <= 8 && p.next_weight);
}

// Deals tiles to clusters; answers the bytes of shared memory.
inline int64_t deal_slices(LinearPlan& plan, const LinearProblem& p, int splits, int clusters, const Device& device) {
  plan.splits = splits, plan.units = clusters;
  plan.base = p.tiles() / plan.units, plan.extra = p.tiles() % plan.units;
  plan.steps = int(divide_up(p.chunks(), slice_chunks(p.format)));
  plan.steps_a_split = int(divide_up(plan.steps, splits));
  const int64_t own = divide_up(int64_t(plan.base + (plan.extra > 0)) * plan.column_blocks, splits);
  const int64_t columns = int64_t(plan.steps_a_split) * slice_chunks(p.format) * kTileColumns;
  const int64_t x = 8 * plan.column_blocks * (columns * 2 + kRowGap);
  const int64_t sums = own * splits * (kWarp * 16);
  plan.x_bytes = x, plan.scale_bytes = sums;
  return std::max<int64_t>(x + sums + own * kTileRows * 8, least_shared(device));
}

// By microseconds, the bytes' own apart. The constants were fitted to 200 plans of 26 products, 8 to 32 rows by 4096 to 14336
// columns; what it takes is 0.6% slower than the best of each on average. us beside 16 rows of int8 by blocks of a
// cluster, warps and rounds: 4096 x 12288 2 x 12 x 1 18.7, 4 x 13 x 2 19.5, 8 x 13 x 4 20.1; 11008 x 4096, nothing asked of
// the L2 ahead, 8 x 9 x 2 19.6, 4 x 9 x 1 20.9.
template <class Residents>
bool plan_slices(LinearPlan& given, const LinearProblem& p, const Device& device, const Residents& residents) {
  constexpr int kMostRounds = 6, kLeastWarps = 9;  // tiles of a warp, warps of a block
  constexpr int kBarriers = 1024;                  // bytes of shared memory, at most
  const bool int4 = p.int4();
  if (!p.bf16 || !p.bare() || p.k == 0 || p.m > (int4 ? 16 : 32) || p.any_groups() || !device.clusters) return false;
  if (!p.requested && (p.requested_splits || !slices_win(p))) return false;
  LinearPlan plan = given, best = given;
  plan.kernel = LinearKernel::slices;
  plan.reason = "blocks of a cluster share the columns, so that more weights are on their way before x has come";
  plan.column_blocks = int4 || (p.m > 8 && p.m <= 16) ? 2 : p.m <= 8 ? 1 : 4, plan.rows_at_once = int(p.m);
  const int columns = plan.column_blocks;
  const double an_x = (int4 ? 0.75 : columns == 4 ? 0.52 : columns == 2 ? 1.29 : 2.) / 40960;
  const double a_round = int4 ? 0.3 : 0.4, a_step = int4 ? 0.083 : 0.071;
  double best_us = 0;
  for (int splits = 2; splits <= kMaxCluster; ++splits) {
    if (p.requested_splits ? p.requested_splits != splits : (splits & (splits - 1)) != 0) continue;
    plan.shape = {0, kSliceWarps * kWarp, 1, splits, size_t(least_shared(device))};
    const int clusters = residents(plan);
    if (clusters == 0) continue;
    for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
      const int warps = int(divide_up(p.tiles(), int64_t(clusters) * rounds));
      if (warps > kSliceWarps || (warps < kLeastWarps && !p.requested_splits)) continue;
      const int64_t shared = deal_slices(plan, p, splits, int(divide_up(p.tiles(), int64_t(warps) * rounds)), device);
      if (shared > device.shared_a_block - kBarriers || plan.steps < splits) continue;
      const int steps = (plan.base + (plan.extra > 0)) * plan.steps_a_split;  // of a block, 1 KB each
      const double us =
          0.022 * steps + an_x * double(plan.x_bytes) + a_round * rounds + a_step * rounds * plan.steps_a_split + 0.013 * splits;
      if (best_us != 0 && us >= best_us) continue;
      // Steps of a warp that the L2 is asked for: us of 4096 x 12288 beside 16 rows for 0, 4, 8 and 14 of 32 20.2, 19.1, 18.7
      // and 19.6, of 4096 x 6144, where a warp has 16, 11.7, 11.4, 12.2 and 12.9. In int4 0 is the best.
      plan.prefetched = int4 ? 0 : std::min(8, rounds * plan.steps_a_split / 4);
      plan.shape = {int64_t(plan.units) * splits, warps * kWarp, 1, splits, size_t(shared)};
      best = plan, best_us = us;
    }
  }
  given = best;
  return best_us != 0;
}

}  // namespace fuseline::linear_plans
