// The launch of the norms' forward of rows that come to shared memory in bulk copies (sm_90): short ones at odd addresses
// (norm_forward_tiled.cuh), and long ones (norm_forward_fetched.cuh).
#pragma once

#include "norm_forward_fetched.cuh"
#include "norm_forward_tiled.cuh"

namespace fuseline {

template <class T, bool kAdded, bool kMasked>
int launch_copied(NormForward a, const NormForwardPlan& plan, const NormCall& call) {
  if (plan.kernel == NormForwardKernel::tiled) {
    const auto kernel = norm_forward_tiled<T, kFewTiled, kAdded, kMasked>;
    return launch_tiles(kernel, TiledNorm{a, plan.part}, plan.shape, call.device, call.stream);
  }
  static_assert(sizeof(FetchedBarriers) == norm_forward_plans::kFetchedBarriers && sizeof(Moments) == kMomentsBytes);
  auto kernel = norm_forward_fetched<T, kAdded, false, kMasked>;
  if constexpr (sizeof(T) == 2 && !kAdded) {
    if (plan.light) kernel = norm_forward_fetched<T, false, true>;
  }
  int count = 0;
  if (const int error = grant(kernel, plan.shape, call, count)) return error;
  a.cluster = plan.shape.cluster;
  return launch(kernel, FetchedNorm{a, plan.part, plan.leaves}, plan.shape, call.device, call.stream);
}

}  // namespace fuseline
