// The backward of all norms for few rows: norms/norm_backward_apart.cuh and norms/norm_backward_few.cuh.
#include "norm_backward_few.cuh"

#include "norm_backward_apart.cuh"

namespace fuseline {
namespace {

template <class X, class Y>
int launch_apart(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  constexpr int kSomeSlots = 16 / kVector<Y>, kMostSlots = 2 * kSomeSlots;
  const auto kernel = plan.slots == 1            ? norm_backward_apart<X, Y, 1>
                      : plan.slots == kSomeSlots ? norm_backward_apart<X, Y, kSomeSlots>
                                                 : norm_backward_apart<X, Y, kMostSlots>;
  ApartNorm apart{a, plan.column_blocks, plan.abreast, plan.across};
  const int error = launch(kernel, apart, plan.shape, call.device, call.stream);
  if (error || plan.sum_column_blocks == 0) return error;
  // By a second launch, which has no rows, and in which they stand for what a norm's bias adds to.
  NormBackward& sums = apart.norm;
  sums.grad_y = a.grad_dropped ? a.grad_dropped : a.grad_x, sums.grad_bias = a.grad_x_bias;
  sums.grad_x = sums.grad_dropped = sums.grad_weight = sums.grad_x_bias = nullptr;
  apart.column_blocks = plan.sum_column_blocks;
  LaunchShape shape = plan.shape;
  shape.grid = plan.sum_column_blocks;
  return launch(kernel, apart, shape, call.device, call.stream);
}

template <class X, class Y>
int launch_few(NormBackward a, const NormBackwardPlan& plan, const NormCall& call) {
  const auto kernel = norm_backward_few<X, Y>;
  int count = 0;
  if (const int error = grant(kernel, plan.shape, call, count)) return error;
  a.cluster = plan.shape.cluster;
  const int clusters = int(plan.shape.grid / a.cluster);
  if (clusters > count) return call.grants.few_clusters = count, kPlanAnew;
  const FewNorm few{a, plan.width, plan.across, plan.rows, clusters, plan.room};
  const int error = launch(kernel, few, plan.shape, call.device, call.stream);
  return error || plan.kinds == 0 ? error : add_partials(a, plan.kinds, clusters, call);
}

}  // namespace

int launch_norm_backward_few(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    if constexpr (!std::is_same_v<Y, __half>) {
      return plan.kernel == NormBackwardKernel::apart ? launch_apart<X, Y>(a, plan, call) : launch_few<X, Y>(a, plan, call);
    }
    return int(FUSELINE_UNSUPPORTED);
  });
}

}  // namespace fuseline
