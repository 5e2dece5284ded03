// The launch of the norms' backward by blocks that stay: in tiles, in rings, in registers. Which instance a plan means.
#pragma once

#include "norm_backward_ring.cuh"
#include "norm_backward_tiled.cuh"
#include "norm_sums.h"

namespace fuseline {

// The kernels of one family of norms, for X and Y.
template <class X, class Y, int kSums, bool kCentred>
struct BackwardKernels {
  static constexpr bool kAdded = kSums == kSumsOfAddedNorm, kMixed = sizeof(X) > sizeof(Y);
  template <int kSlots>
  using Held = HeldKind<X, Y, kSlots, norm_backward_plans::held_rows(kSlots, kAdded || kMixed),
                        norm_backward_plans::held_threads(kSlots, kAdded, kMixed), kSums, kCentred>;
  template <int kSlots>
  using Ring = RingKind<X, Y, kSlots, kSums, kCentred>;

  static auto of(const NormBackwardPlan& plan) -> void (*)(NormBackward) {
    if (plan.kernel == NormBackwardKernel::tiled) return norm_backward_tiled<TileKind<X, Y, kSums, kCentred, TileRows::kVectors>>;
    if (plan.kernel == NormBackwardKernel::ring) {
      if (plan.slots == 2) return norm_backward_ring<Ring<2>>;
      if constexpr (kAdded && sizeof(Y) == 2) return norm_backward_ring<Ring<3>>;
      if constexpr (!kAdded && !kMixed) return norm_backward_ring<Ring<4>>;
    }
    if constexpr (sizeof(Y) == 4 && !kAdded) {
      if (plan.slots == 4) return norm_backward_held<Held<4>>;
    }
    return plan.slots == 1 ? norm_backward_held<Held<1>> : norm_backward_held<Held<2>>;
  }
};

// As many blocks, or clusters, stay as the device holds, and no more than the plan has.
template <class Y>
int launch_staying(void (*kernel)(NormBackward), NormBackward a, const NormBackwardPlan& plan, const NormCall& call) {
  int count = 0;
  if (const int error = grant(kernel, plan.shape, call, count)) return error;
  a.cluster = plan.shape.cluster, a.stages = plan.stages, a.beside = plan.neighbors;
  LaunchShape shape = plan.shape;
  const int blocks = int(std::min<int64_t>(shape.grid / shape.cluster, count));
  shape.grid = int64_t(blocks) * shape.cluster;
  const int error = launch(kernel, a, shape, call.device, call.stream);
  return error || plan.kinds == 0 ? error : add_partials<Y>(a, plan.kinds, blocks, call.device.clusters, call.stream);
}

template <int kSums, bool kCentred>
int launch_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    using Y = decltype(y);
    return launch_staying<Y>(BackwardKernels<decltype(x), Y, kSums, kCentred>::of(plan), a, plan, call);
  });
}

}  // namespace fuseline
