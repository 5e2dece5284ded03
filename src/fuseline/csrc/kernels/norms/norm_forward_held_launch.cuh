// The launch of the norms' forward of rows that threads hold in registers: which instance of which kernel a plan means.
#pragma once

#include "norm_forward_few.cuh"
#include "norm_forward_held.cuh"
#include "norm_forward_packed.cuh"

namespace fuseline {

// The instance that a plan means. Registers of a thread leave room for blocks enough; what a multiprocessor has at least. fp16
// has those that prompts and training need, the others what has been measured to matter.
template <class T, bool kAdded, bool kMasked>
auto held_kernel(const NormForwardPlan& plan) -> void (*)(NormForward) {
  constexpr int kShort = kMostShortRowBlock, kLong = kMostThreads;
  constexpr bool kEarly = !kMasked;  // registers that a mask takes
  constexpr bool kFp16 = std::is_same_v<T, __half>, kFp32 = sizeof(T) == 4;
  const auto of = [](auto layout) -> void (*)(NormForward) {
    return norm_forward_held<T, decltype(layout), kAdded, kMasked>;
  };
  if (plan.shape.cluster > 1) {
    if constexpr (!kFp16) {
      if (plan.held == 1) return of(Holding<1, 1, false, kEarly, kLong, 2, true>{});
    }
    if constexpr (kAdded || !kFp16) return of(Holding<2, 1, false, kEarly, kLong, 2, true>{});
  }
  if (plan.one_warp) {
    if constexpr (!kFp16 && (kAdded || !kFp32)) {
      if (plan.turns > 1) return of(Holding<1, norm_forward_plans::kShortRows, true, kEarly, kShort, 4>{});
    }
    if (plan.held == 1) return of(Holding<1, 1, true, kEarly, kShort, 4>{});
    if constexpr (!kMasked && !kFp32) {
      if (plan.held == 2) return of(Holding<2, 1, true, kEarly, kShort, 4>{});
    }
    if constexpr (kMasked || (!kAdded && !kFp16)) {
      if (plan.held == 3) return of(Holding<3, 1, true, kEarly, kShort, 3>{});
    }
    if constexpr (!kAdded && !kFp32) return of(Holding<4, 1, true, true, kShort, 2>{});
  }
  if (plan.held == 1) return of(Holding<1, 1, false, kEarly, kLong, 2>{});
  if (plan.held == 2) return of(Holding<2, 1, false, kEarly, kLong, 2>{});
  if constexpr (!kAdded) {
    if constexpr (!kFp16) {
      if (plan.early) return of(Holding<4, 1, false, true, 256, 3>{});
    }
    return of(Holding<4, 1, false, false, kLong, 2>{});
  }
  return nullptr;
}

template <class T, bool kAdded, bool kMasked = false>
int launch_held(NormForward a, const NormForwardPlan& plan, const NormCall& call) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kBf16 && !kAdded) {
    if (plan.kernel == NormForwardKernel::packed) {
      return launch(norm_forward_packed<T>, PackedNorm{a, float(1.0 / double(a.n))}, plan.shape, call.device, call.stream);
    }
  }
  if constexpr (kBf16 && !kMasked) {
    if (plan.kernel == NormForwardKernel::few) return launch_few<T, kAdded>(a, plan.shape, call.device, call.stream);
  }
  a.cluster = plan.shape.cluster;
  return launch(held_kernel<T, kAdded, kMasked>(plan), a, plan.shape, call.device, call.stream);
}

}  // namespace fuseline
