// The launch of the norms' backward by blocks that stay: in tiles, in rings, in registers. Which instance a plan means.
#pragma once

#include "norm_backward_ring.cuh"
#include "norm_backward_tiled.cuh"

namespace fuseline {

template <class X, class Y, int kSlots, int kSums, bool kCentred>
using HeldOf = HeldKind<X, Y, kSlots, norm_backward_plans::held_rows(kSlots, kSums == kSumsOfAddedNorm),
                        norm_backward_plans::held_threads(kSlots, kSums == kSumsOfAddedNorm, sizeof(X) > sizeof(Y)), kSums,
                        kCentred>;

// The kernel of one family of norms, for X and Y, that a plan means. Of two dtypes there is the family with all sums alone, and
// fp16 has what training in mixed precision needs, and rings.
template <class X, class Y, int kSums, bool kCentred>
auto backward_kernel(const NormBackwardPlan& plan) -> void (*)(NormBackward) {
  constexpr bool kAdded = kSums == kSumsOfAddedNorm, kMixed = sizeof(X) > sizeof(Y), kFp16 = std::is_same_v<Y, __half>;
  const bool ring = plan.kernel == NormBackwardKernel::ring;
  if constexpr (kMixed || !kFp16) {
    if (plan.kernel == NormBackwardKernel::tiled) return norm_backward_tiled<TileKind<X, Y, kSums, kCentred>>;
    if constexpr (kAdded && sizeof(Y) == 2) {
      if (ring && plan.slots == 3) return norm_backward_ring<RingKind<X, Y, 3, kSums, kCentred>>;
    }
    if constexpr (!kAdded) {
      if (ring && plan.slots == 4) return norm_backward_ring<RingKind<X, Y, 4, kSums, kCentred>>;
    }
  }
  if (ring) return norm_backward_ring<RingKind<X, Y, 2, kSums, kCentred>>;
  if constexpr (!kFp16) {
    if (plan.slots == 2) return norm_backward_held<HeldOf<X, Y, 2, kSums, kCentred>>;
    return norm_backward_held<HeldOf<X, Y, 1, kSums, kCentred>>;
  }
  return nullptr;
}

// As many blocks, or clusters, stay as the device holds, and no more than the plan has.
inline int launch_staying(void (*kernel)(NormBackward), NormBackward a, const NormBackwardPlan& plan, const NormCall& call) {
  int count = 0;
  if (const int error = grant(kernel, plan.shape, call, count)) return error;
  a.cluster = plan.shape.cluster, a.stages = plan.stages, a.beside = plan.neighbors;
  LaunchShape shape = plan.shape;
  const int blocks = int(std::min<int64_t>(shape.grid / shape.cluster, count));
  shape.grid = int64_t(blocks) * shape.cluster;
  const int error = launch(kernel, a, shape, call.device, call.stream);
  return error || plan.kinds == 0 ? error : add_partials(a, plan.kinds, blocks, call);
}

template <int kSums, bool kCentred>
int launch_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  return with_dtypes(call.dtype, call.y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    if constexpr (sizeof(X) == sizeof(Y) || kSums == kSumsOfAddedNorm) {
      return launch_staying(backward_kernel<X, Y, kSums, kCentred>(plan), a, plan, call);
    }
    return int(FUSELINE_UNSUPPORTED);
  });
}

}  // namespace fuseline
