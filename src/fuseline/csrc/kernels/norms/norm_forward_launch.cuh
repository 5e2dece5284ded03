// The launch of the norms' forward of rows of two dtypes, or at any address: which instance of which kernel a plan means.
#pragma once

#include "norm_forward_long.cuh"
#include "norm_forward_rows.cuh"

namespace fuseline {

template <class X, class Y, bool kAdded>
auto forward_kernel(const NormForwardPlan& plan) -> void (*)(NormForward) {
  constexpr int kMost = (sizeof(Y) == 4 ? 8 : 4) / (kAdded ? 2 : 1), kLeast = kMost < 4 ? 1 : kMost / 4;
  constexpr int kHalf = kMost / 2;
  if (plan.kernel == NormForwardKernel::waiting) return norm_forward_waiting<X, Y, kAdded>;
  if constexpr (!std::is_same_v<X, Y>) {
    if (plan.vectors && !plan.one_warp) {
      return plan.held == kMost ? norm_forward_rows<X, Y, kAdded, kMost, true, false>
                                : norm_forward_rows<X, Y, kAdded, kLeast, true, false>;
    }
    if (plan.vectors && plan.held == kMost) return norm_forward_rows<X, Y, kAdded, kMost, true, true>;
    if (plan.vectors && plan.held == kHalf) return norm_forward_rows<X, Y, kAdded, kHalf, true, true>;
    if (plan.vectors) return norm_forward_rows<X, Y, kAdded, kLeast, true, true>;
  }
  return norm_forward_rows<X, Y, kAdded, kMost, false, false>;
}

template <class X, class Y, bool kAdded>
int launch_rows(NormForward a, const NormForwardPlan& plan, const NormCall& call) {
  const auto kernel = forward_kernel<X, Y, kAdded>(plan);
  a.cluster = plan.shape.cluster;
  int count = 0;
  const bool waits = plan.kernel == NormForwardKernel::waiting;
  if (const int error = waits ? grant(kernel, plan.shape, call, count) : 0) return error;
  const dim3 block(unsigned(plan.shape.threads), unsigned(plan.shape.beside));
  const bool early = call.device.clusters && !waits;
  return launch(kernel, a, plan.shape.grid, block, plan.shape.shared, a.cluster, call.stream, early);
}

}  // namespace fuseline
