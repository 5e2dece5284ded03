// Which kernel takes y = gelu(x + bias) or its gradients, and how: the one place that decides. gelu.cu launches what the plan
// says, and `fuseline explain gelu` prints it.
#pragma once

#include <limits>

#include "elementwise.h"

namespace fuseline {

enum class GeluKernel {
  elementwise,         // forward, and backward without the bias's gradient
  bias_gradients_few,  // few rows: blocks have all rows of their columns
  bias_gradients       // blocks leave sums of their rows, which a second kernel adds up
};

// As profilers show it.
inline const char* name_of(GeluKernel kernel) {
  return kernel == GeluKernel::elementwise          ? "elementwise"
         : kernel == GeluKernel::bias_gradients_few ? "gelu_bias_gradients_few"
                                                    : "gelu_bias_gradients";
}

namespace gelu_plans {

constexpr int kGeluRows = 2;  // of a thread, of 8 bytes each

// Of 4,096, 768, 1,000, 16,384 and 262,144 columns in bf16, us: blocks of 64 rows, 8 bytes a thread, 281, 280, 283, 287, 284;
// of 32 rows 294, 296, 299, 304, 294; of 128 287, 286, 291, 288, 291; 256 threads with 64 rows 290, 291, 296, 297, 293; 16
// bytes a thread 292 and more; blocks that stay, the next rows on their way, 291, 290, 297, 293, 289.
constexpr int kBiasThreads = 512;
constexpr int kBiasBlocks = 2;      // a multiprocessor holds at once
constexpr int kBiasRows = 4;        // of a thread in flight
constexpr int kBiasBlockRows = 64;  // of a block, in all turns
constexpr int kAcross = 64;         // threads of a block along a row,
constexpr int kAcrossOdd = 256;     // and along rows that do not begin at lines of the cache: the longer, the fewer are shared

constexpr int kFewThreads = 512;
constexpr int kFewRows = 2;
constexpr int kFewBlocks = 2;  // a multiprocessor holds at once
constexpr int64_t kMostFewRows = 512, kMostFewColumns = 1 << 24;

struct FewBiasPlan {
  int across = 0, threads = 0;  // 0: not for few rows' kernel
  int64_t blocks = 0;
};

inline FewBiasPlan plan_few_bias(int64_t rows, int64_t n, int wide, const Device& device) {
  if (rows > kMostFewRows || n % wide != 0 || n > kMostFewColumns) return {};
  FewBiasPlan plan;
  const int64_t vectors = n / wide;
  // As many side by side as leave a block for each multiprocessor, and two warps at least. Half a sector only where a
  // whole one would leave a multiprocessor without a block.
  plan.across = vectors <= device.processors ? 1 : 2;
  while (plan.across < kWarp &&
         (vectors >= 2 * int64_t(plan.across) * device.processors || plan.across * rows < 2 * kWarp)) {
    plan.across *= 2;
  }
  const int64_t down = std::min<int64_t>(kFewThreads / plan.across, power_of_two_from(rows));
  plan.threads = int(std::max<int64_t>(kWarp, plan.across * down));
  plan.blocks = divide_up(vectors, plan.across);
  // Blocks of many rows that are not all held at once would leave a few to run alone at the end.
  const int64_t held = int64_t(device.processors) * kFewBlocks * kFewThreads;
  if (rows > kFewRows * down && plan.blocks * plan.threads > held) return {};
  return plan;
}

// How rows of n are taken together into rows of whole accesses, about a warp's at least; if a few of them end with a
// warp's 512 bytes or at least with a line of the cache, so many.
inline int64_t joined(int element_size, int64_t n, int wide) {
  constexpr int64_t kEnds[2] = {512, 128}, kLongest = 16384;
  int64_t least = 1;
  while (least < wide && n * least % wide != 0) least *= 2;
  const int64_t positions = n * least / wide;
  least *= std::max<int64_t>(1, kWarp / std::max<int64_t>(1, positions));
  for (const int64_t end : kEnds) {
    for (int64_t rows = least; rows == least || n * rows <= kLongest; rows *= 2) {
      if (n * rows * element_size % end == 0) return rows;
    }
  }
  return least;
}

// The same beside a bias's gradient. Odd rows that would end with a line only many blocks further on are so many together as
// fill one block, whose sums are a row's then: bf16 and fp32 of 31 elements read 0.944 and 0.946 of the copy bandwidth, and by
// lines 0.849 and 0.912; half as many 0.912, twice 0.932 and 0.936.
inline int64_t joined_in_block(int element_size, int64_t n, int wide) {
  const int64_t rows = joined(element_size, n, wide), most = int64_t(kAcross) * wide;  // elements
  if (n % 2 == 0 || n * rows <= int64_t(kAcrossOdd) * wide) return rows;
  int64_t least = 1;
  while (least < wide && n * least % wide != 0) least *= 2;
  const int64_t filled = most / (n * least) * least;
  return n * filled * 8 >= most * 7 ? filled : rows;
}

// The grid of the kernel with the bias's gradient, and what it leaves behind.
struct BiasPlan {
  int64_t row_elements = 0, rows = 0;
  int64_t across = kWarp;  // threads of a block along a row
  int64_t blocks = 0;      // along a row
  int64_t turns = 0;
  int64_t groups = 0;      // of rows, each for blocks of its own
  bool fold = false;
  int64_t partial_rows(int64_t n) const { return groups * (fold ? 1 : row_elements / n); }
};

inline BiasPlan plan_bias(int element_size, int64_t rows, int64_t n, int wide, const Device& device) {
  constexpr int64_t kLine = 128;
  BiasPlan plan;
  plan.row_elements = n * joined_in_block(element_size, n, wide);
  plan.rows = divide_up(rows * n, plan.row_elements);
  // The widest blocks that leave few threads without a position: they read the longest runs of memory.
  const int64_t positions = divide_up(plan.row_elements, wide);
  const int64_t widest = plan.row_elements * element_size % kLine == 0 ? kAcross : kAcrossOdd;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (int64_t across = widest; across >= kWarp; across /= 2) {
    const int64_t laid = divide_up(positions, across) * across;
    if (laid + positions / 16 < fewest) fewest = laid, plan.across = across;
  }
  plan.blocks = divide_up(positions, plan.across);
  plan.fold = plan.blocks == 1;
  const int64_t turn = kBiasThreads / plan.across * kBiasRows;  // rows of a block at a time
  plan.turns = std::max<int64_t>(1, kBiasBlockRows / turn);
  // Fewer rows a block where there would not be one for each place.
  const int64_t places = int64_t(device.processors) * kBiasBlocks;
  while (plan.turns > 1 && plan.blocks * divide_up(plan.rows, plan.turns * turn) < places) plan.turns /= 2;
  plan.groups = divide_up(plan.rows, plan.turns * turn);
  return plan;
}

}  // namespace gelu_plans

struct GeluProblem {
  int element_size;
  int64_t rows, n;
  int aligned_to;  // bytes that all tensors keep to: 16, 8 or 1
  bool bias;
  bool bias_gradient;
  bool fp16 = false;  // which no model has: no kernel of its own for few rows
};

struct GeluPlan {
  GeluKernel kernel = GeluKernel::elementwise;
  const char* reason = "";
  LaunchShape shape;
  int wide = 1;               // elements of an access; threads lie over the tensors as if each had 8 or 16 bytes
  size_t workspace = 0;       // bytes
  WalkPlan walk;              // of `elementwise`
  gelu_plans::BiasPlan bias;  // of `bias_gradients`
  int across = 0;             // of `bias_gradients_few`: accesses of a block along a row
};

inline GeluPlan plan_gelu(const GeluProblem& p, const Device& device) {
  using namespace gelu_plans;
  GeluPlan plan;
  const int half = 8 / p.element_size;
  plan.wide = p.aligned_to >= 8 ? half : 1;
  if (!p.bias_gradient) {
    plan.reason = p.aligned_to >= 8 ? "each element is computed alone, in accesses of 8 bytes"
                                    : "each element is computed alone; a tensor does not begin at 8 bytes";
    const int64_t row = p.bias ? p.n * joined(p.element_size, p.n, half) : int64_t(kElementwiseBlock) * half;
    plan.walk = plan_walk(p.rows * p.n, row, half, kGeluRows, device);
    plan.shape = shape_of(plan.walk, device);
    return plan;
  }
  const int size = 16 / p.element_size;
  const FewBiasPlan few = p.aligned_to == 16 && !p.fp16 ? plan_few_bias(p.rows, p.n, size, device) : FewBiasPlan{};
  if (few.threads > 0) {
    plan.kernel = GeluKernel::bias_gradients_few, plan.wide = size, plan.across = few.across;
    plan.reason = "the rows are few: a block has all rows of its columns, and their sum needs no second kernel";
    plan.shape = {few.blocks, few.threads, 1, 1, 0};
    return plan;
  }
  plan.kernel = GeluKernel::bias_gradients;
  plan.reason = "blocks sum the bias's gradient over their rows, and a second kernel adds the blocks' sums";
  plan.bias = plan_bias(p.element_size, p.rows, p.n, half, device);
  plan.workspace = size_t(plan.bias.partial_rows(p.n) * p.n) * sizeof(float);
  plan.shape = {plan.bias.blocks * plan.bias.groups, int(plan.bias.across), int(kBiasThreads / plan.bias.across), 1, 0};
  return plan;
}

}  // namespace fuseline
