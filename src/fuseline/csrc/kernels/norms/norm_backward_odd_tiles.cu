// The backward of all norms for many short rows at odd addresses: norms/norm_backward_tiled.cuh, with all the sums that any
// norm has.
#include "norm_backward_launch.cuh"

namespace fuseline {

int launch_norm_backward_odd_tiles(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    using Y = decltype(y);
    const auto kernel = norm_backward_tiled<TileKind<decltype(x), Y, kSumsOfAddedNorm, true, TileRows::kOdd>>;
    return launch_staying<Y>(kernel, a, plan, call);
  });
}

}  // namespace fuseline
