// Which kernel multiplies rows of activations with the weight of a linear layer, and how: the one place that decides.
// linear/quant_linear.cu launches what the plan says, and `fuseline explain quant_linear` prints it.
#pragma once

#include "linear_few_rows.h"
#include "linear_tiles.h"

namespace fuseline {

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
