// The launch of the norms' forward of rows that threads hold in registers: which instance of which kernel a plan means.
#pragma once

#include "norm_forward_few.cuh"
#include "norm_forward_held.cuh"
#include "norm_forward_packed.cuh"

namespace fuseline {

// Registers of a thread leave room for blocks enough; what a multiprocessor has at least.
template <class T, bool kAdded, bool kMasked>
auto held_kernel(const NormForwardPlan& plan) -> void (*)(NormForward) {
  constexpr int kShort = kMostShortRowBlock, kLong = kMostThreads;
  constexpr bool kEarly = !kMasked;  // registers that a mask takes
  const auto of = [](auto layout) -> void (*)(NormForward) {
    return norm_forward_held<T, decltype(layout), kAdded, kMasked>;
  };
  if (plan.shape.cluster > 1) {
    if (plan.held == 1) return of(Holding<1, 1, false, kEarly, kLong, 2, true>{});
    return of(Holding<2, 1, false, kEarly, kLong, 2, true>{});
  }
  if (plan.one_warp) {
    if (plan.turns > 1) return of(Holding<1, norm_forward_plans::kShortRows, true, kEarly, kShort, 4>{});
    if (plan.held == 1) return of(Holding<1, 1, true, kEarly, kShort, 4>{});
    if (plan.held == 2) return of(Holding<2, 1, true, kEarly, kShort, 4>{});
    if constexpr (kMasked) {
      if (plan.held == 3) return of(Holding<3, 1, true, false, kShort, 3>{});
    }
    if constexpr (!kAdded) {
      if (plan.held == 3) return of(Holding<3, 1, true, true, kShort, 3>{});
      return of(Holding<4, 1, true, true, kShort, 2>{});
    }
  }
  if (plan.held == 1) return of(Holding<1, 1, false, kEarly, kLong, 2>{});
  if (plan.held == 2) return of(Holding<2, 1, false, kEarly, kLong, 2>{});
  if constexpr (!kAdded) {
    if constexpr (!std::is_same_v<T, __half>) {
      if (plan.early) return of(Holding<4, 1, false, true, 256, 3>{});
    }
    return of(Holding<4, 1, false, false, kLong, 2>{});
  }
  return nullptr;
}

template <class T, bool kAdded, bool kMasked = false>
int launch_held(NormForward a, const NormForwardPlan& plan, const NormCall& call) {
  if constexpr (sizeof(T) == 2 && !kAdded) {
    if (plan.kernel == NormForwardKernel::packed) {
      return launch(norm_forward_packed<T>, PackedNorm{a, float(1.0 / double(a.n))}, plan.shape, call.device, call.stream);
    }
  }
  if constexpr (sizeof(T) == 2 && !kMasked) {
    if (plan.kernel == NormForwardKernel::few) return launch_few<T, kAdded>(a, plan.shape, call.device, call.stream);
  }
  a.cluster = plan.shape.cluster;
  return launch(held_kernel<T, kAdded, kMasked>(plan), a, plan.shape, call.device, call.stream);
}

}  // namespace fuseline
