// What the plans of the norms' forward and backward share: norm_forward.h, norm_backward.h.
#pragma once

#include "waiting.h"

namespace fuseline {

// What a norm is of. Layouts are measured for each.
enum class NormOf {
  x,
  sum,        // residual + x
  masked_sum  // residual + dropout(x + x_bias): with a mask, a bias, or both
};

// What the device has granted so far. Plans ask for more first; a launcher that the device refuses asks for the plan without.
struct NormGrants {
  bool large_clusters = true;  // of more than kMaxCluster blocks
  int few_clusters = 8;        // at once of the backward's kernel of few rows
};

constexpr int64_t kLongestNormRow = int64_t(1) << 30;  // elements that kernels with 32-bit columns take
constexpr int64_t kFewNormRows = 8;                    // a multiprocessor: fewer have layouts of their own
constexpr int kMomentsBytes = 16;                      // of what a warp knows of its part of a row

namespace norm_plans {

// Whether a layout is being measured, in place of all others.
inline bool is_measured(const RowChoice* choice) { return choice && choice->longest == INT64_MAX; }

// The table's layout for many rows of one dtype; null where rules lay them out.
inline const RowChoice* choice_for_many(NormOf of, bool centred, bool backward, int element_size, int64_t rows, int64_t n,
                                        const Device& device) {
  const auto rules = backward ? FUSELINE_LAYER_NORM_BACKWARD : FUSELINE_LAYER_NORM_FORWARD;
  if (!device.clusters || row_overrides[rules].given) return nullptr;
  const auto family = fuseline_family(FUSELINE_MANY_NORMS + 4 * int(of) + 2 * int(!centred) + int(backward));
  if (!are_many(rows, rows * n * element_size, device) && !row_overrides[family].given) return nullptr;
  const RowChoice* const choice = choice_for(family, element_size, n, device.memory_gbs);
  return choice && choice->kernel != RowKernel::rules ? choice : nullptr;
}

}  // namespace norm_plans
}  // namespace fuseline
