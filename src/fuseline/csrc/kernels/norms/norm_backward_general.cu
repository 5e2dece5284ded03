// The backward of all norms for rows that no other kernel takes: norms/norm_backward_general.cuh.
#include "norm_backward_general.cuh"

#include "norm_sums.h"

namespace fuseline {
namespace {

template <class X, class Y>
int launch_general(NormBackward a, const NormBackwardPlan& plan, const NormCall& call) {
  a.cluster = plan.shape.cluster;
  GeneralNorm given{a, nullptr, plan.column_blocks, plan.shares};
  // What the sums of x_bias's gradient are made of stands behind the partial sums.
  if (a.grad_x_bias) given.terms = reinterpret_cast<float2*>(a.partials + int64_t(plan.kinds) * plan.blocks * a.columns);
  const auto rows = [&](const GeneralNorm& of) {
    return launch(norm_backward_general<X, Y>, of, plan.shape, call.device, call.stream);
  };
  const auto sums = [&] {
    const LaunchShape shape{int64_t(plan.column_blocks) * plan.shares, kWarp, kGeneralWarps, 1, 0};
    const int error = launch(norm_backward_general_sums<X, Y>, given, shape, call.device, call.stream);
    return error || plan.kinds == 0 ? error : add_partials<Y>(a, plan.kinds, plan.blocks, call.device.clusters, call.stream);
  };
  int error = 0;
  if (given.terms) {  // the sums need them, and come before anything is written: a result may stand where an input does
    GeneralNorm terms = given;
    terms.norm.grad_x = terms.norm.grad_dropped = nullptr;
    bool over = false;
    for (const void* const result : {a.grad_x, a.grad_dropped}) {
      over = over || (result && (result == a.x || result == a.grad_y || result == a.grad_sum));
    }
    error = rows(over ? terms : given);
    if (!error) error = sums();
    return error || !over ? error : rows(given);
  }
  if (plan.column_blocks > 0) error = sums();
  return error || !a.wants_rows() ? error : rows(given);
}

}  // namespace

int launch_norm_backward_general(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype,
                     [&](auto x, auto y) { return launch_general<decltype(x), decltype(y)>(a, plan, call); });
}

}  // namespace fuseline
