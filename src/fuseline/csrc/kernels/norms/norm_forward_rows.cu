// The launch of the norms' forward, of x or of residual + dropout(x + x_bias), of two dtypes or at any address: which instance of
// which kernel of norm_forward_rows.cuh and norm_forward_long.cuh a plan means.
#include "norm_forward_long.cuh"
#include "norm_forward_rows.cuh"

namespace fuseline {

template <class X, class Y, bool kAdded>
auto forward_kernel(const NormForwardPlan& plan) -> void (*)(NormForward) {
  constexpr int kMost = (sizeof(Y) == 4 ? 8 : 4) / (kAdded ? 2 : 1);
  if constexpr (!std::is_same_v<Y, __half>) {
    if (plan.kernel == NormForwardKernel::waiting) return norm_forward_waiting<X, Y>;
  }
  if (!plan.vectors) return norm_forward_rows<X, Y, true, sizeof(Y) == 4 ? 4 : 2, false, false>;
  if constexpr (!std::is_same_v<X, Y>) {
    if constexpr (std::is_same_v<Y, __nv_bfloat16>) {
      if (plan.held == 1 && plan.one_warp) return norm_forward_rows<X, Y, kAdded, 1, true, true>;
      if (plan.held == 1) return norm_forward_rows<X, Y, kAdded, 1, true, false>;
    }
    return plan.one_warp ? norm_forward_rows<X, Y, kAdded, kMost, true, true>
                         : norm_forward_rows<X, Y, kAdded, kMost, true, false>;
  }
  return nullptr;
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

int launch_norm_rows(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    return a.residual ? launch_rows<X, Y, true>(a, plan, call) : launch_rows<X, Y, false>(a, plan, call);
  });
}

}  // namespace fuseline
