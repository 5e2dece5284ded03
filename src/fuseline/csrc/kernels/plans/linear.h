// Which kernel multiplies rows of activations with the weight of a linear layer, and how: the one place that decides.
// linear/quant_linear.cu launches what the plan says, and `fuseline explain quant_linear` prints it.
#pragma once

#include "linear_sizes.h"

namespace fuseline {

enum class LinearKernel {
  unsupported,     // none: torch multiplies with the dequantized weight
  gemv,            // 16-bit weights and up to 4 rows of x: a warp has rows of W
  gemv_team,       // the same where several warps share a row of W
  gemv_quantized,  // one row of x and so few quantized weights that all are on their way at once
  stream,          // each warp a stream of weights
  slices,          // quantized weights on Hopper: blocks of a cluster have slices of the columns
  tiles,           // quantized weights on Hopper, products of warpgroups
  few_weights      // 65 to 256 rows of x and few quantized weights on Hopper
};

// As profilers show it.
inline const char* name_of(LinearKernel kernel) {
  switch (kernel) {
    case LinearKernel::gemv:
      return "gemv_kernel";
    case LinearKernel::gemv_team:
      return "gemv_team_kernel";
    case LinearKernel::gemv_quantized:
      return "gemv_quantized_kernel";
    case LinearKernel::stream:
      return "linear_stream_kernel";
    case LinearKernel::slices:
      return "linear_slices_kernel";
    case LinearKernel::tiles:
      return "linear_tiles_kernel";
    case LinearKernel::few_weights:
      return "linear_65_to_256_kernel";
    default:
      return "";
  }
}

struct LinearProblem {
  int format;  // a fuseline_weight_format
  bool bf16;   // or fp16
  int64_t m, n, k;
  int group_shift = 0;  // int4: a group is 32 << group_shift columns
  bool zeros = false;   // int4: there are zero points
  bool x_vectors = true;       // rows of x begin at multiples of 16 bytes and are so many long
  bool weight_vectors = true;  // likewise those of a 16-bit weight
  bool norm = false, residual = false, swiglu = false;
  bool activation = false;  // SwiGLU or another
  bool next_weight = false;
  bool workspace = true;  // there is one
  int requested = FUSELINE_LINEAR_ANY, requested_splits = 0;  // for measuring

  bool plain() const { return format == FUSELINE_WEIGHT_16; }
  bool int4() const { return format == FUSELINE_WEIGHT_INT4; }
  bool any_groups() const { return int4() && (zeros || group_shift < 2); }
  bool bare() const { return !norm && !activation && !residual; }
  int64_t weights() const { return n * k; }
  int tiles() const { return int(divide_up(n, kTileRows)); }
  int chunks() const { return int(divide_up(k, kTileColumns)); }
};

struct LinearPlan {
  LinearKernel kernel = LinearKernel::unsupported;
  const char* reason = "more rows, or more around the product, than its kernels take";
  LaunchShape shape;
  // Which of its kernels.
  int x_rows = 0;           // gemv: rows of x that there is room for; tiles: of x in a block
  int team = 0;             // gemv_team: warps that share a row of W
  int weight_rows = 0;      // gemv: rows of W of a warp; one is shared by two
  int tile_parts = 0;       // gemv_quantized: of a tile, each for a block
  int pieces = 0;           // gemv_quantized: of weights that a warp takes
  int column_blocks = 0;    // stream, slices: of 8 rows of x
  bool any_groups = false;  // stream, tiles
  int warpgroups = 0;       // few_weights
  // Who has which part of the work.
  int rows_at_once = 0;  // of x in a launch; others follow while there are more
  int splits = 1;        // blocks that share the columns
  int units = 0, base = 0, extra = 0;    // streams, slices: clusters; of each, units of tiles (of tiles: steps of a block), and
                                         // how many have one more
  int steps = 0, steps_a_split = 0;      // of k, and of it that a block has
  int groups_a_slice = 0;                // streams: that a block has scales of, at most
  int64_t x_bytes = 0, scale_bytes = 0;  // of shared memory
  int prefetched = 0;                    // steps of a warp that the L2 is asked for at once
  bool ordered = false;                  // tiles: a launch ahead puts x in order in the workspace
  size_t workspace = 0;                  // bytes
};

namespace linear_plans {

// Blocks of a multiprocessor that the launch bounds of a plan's kernel leave room for.
inline int bounded_blocks(const LinearPlan& plan, const LinearProblem& p, const Device& device) {
  switch (plan.kernel) {
    case LinearKernel::gemv:
    case LinearKernel::gemv_team:
      return plan.x_rows == 1 ? 3 : 2;
    case LinearKernel::stream:
      return device.clusters ? stream_sizes(p.format, plan.column_blocks, plan.any_groups).blocks : 1;
    case LinearKernel::tiles:
      return tiles_sizes(p.format, plan.x_rows, plan.any_groups).blocks;
    default:
      return 1;
  }
}

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

}  // namespace linear_plans

// Rows of x up to which a kernel is asked at all, by measurement; with more, torch's product with the whole weight is faster.
inline int64_t most_linear_rows(int format, int64_t n, int64_t k) {
  constexpr int64_t kManyWeights = 32 << 20;
  if (format == FUSELINE_WEIGHT_16) return k % 8 == 0 ? 4 : 0;
  return n * k < kManyWeights ? 512 : 1024;
}

// Rows of x up to which no kernel wants a workspace.
constexpr int64_t kRowsWithoutWorkspace = 8;

// `residents` answers how many clusters (or blocks alone) of a plan's kernel the device holds at once, 0 where it has no such
// kernel.
template <class Residents>
LinearPlan plan_linear(const LinearProblem& p, const Device& device, const Residents& residents) {
  using namespace linear_plans;
  constexpr int kFastStreams = 16;             // rows of x up to which a stream is the fastest, where slices are not
  constexpr int64_t kManyWeights = 32 << 20;   // but for more than 8 rows and so many weights
  LinearPlan plan;
  const auto asks_for = [&](int kernel) { return !p.requested || p.requested == kernel; };
  if (p.requested == FUSELINE_LINEAR_GEMV || (!p.requested && !p.requested_splits)) {
    const bool taken = p.plain() ? plan_gemv(plan, p, device, residents) : plan_gemv_quantized(plan, p, device);
    if (taken || p.requested) return plan;
  }
  if (!p.plain() && asks_for(FUSELINE_LINEAR_SLICES) && plan_slices(plan, p, device, residents)) return plan;
  if (!p.plain() && asks_for(FUSELINE_LINEAR_65_TO_256) && plan_65_to_256(plan, p, device, residents)) return plan;
  const bool tiles = asks_for(FUSELINE_LINEAR_TILES), streams = asks_for(FUSELINE_LINEAR_STREAM);
  const bool many_rows = p.m > (p.weights() >= kManyWeights ? 8 : kFastStreams);
  if (many_rows && tiles && plan_tiles(plan, p, device, residents)) return plan;
  if (streams && plan_stream(plan, p, device, residents)) return plan;
  if (!many_rows && tiles && plan_tiles(plan, p, device, residents)) return plan;
  if (streams) plan_streams(plan, p, device, residents);
  return plan;
}

// What `residents` is without a GPU to ask: as many as launch bounds and shared memory leave room for, wherever the
// multiprocessors of a cluster lie.
struct EstimatedResidents {
  const LinearProblem& problem;
  const Device& device;

  int operator()(const LinearPlan& plan) const {
    return estimated_clusters(linear_plans::bounded_blocks(plan, problem, device), plan.shape, device);
  }
};

}  // namespace fuseline
