// What a plan of a linear layer (linear.h) is about, and what it says.
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

}  // namespace linear_plans

}  // namespace fuseline
