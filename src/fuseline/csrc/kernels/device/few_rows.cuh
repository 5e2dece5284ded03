// What kernels of few rows share, whose time is what a row waits for, one thing after the other.
#pragma once

#include "group.cuh"
#include "packed_rows.cuh"

namespace fuseline {

// The compilers would rather compute what is used after a wait there. A branch on it they cannot put off: it is never taken,
// for no sum of addresses is 1.
__device__ __forceinline__ void known_by_now(uint64_t sum) {
  if (__any_sync(kAllLanes, sum == 1)) __trap();  // together, or the branch would take uniform registers from what follows
}
__device__ __forceinline__ uint64_t number(const void* at) { return reinterpret_cast<uint64_t>(at); }

// How the L2 treats what is read once: it leaves before all else, or as all else does.
__device__ __forceinline__ uint64_t policy_of(bool leaves) {
  uint64_t policy;
  if (leaves) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}
__device__ __forceinline__ uint4 load_by(const void* at, uint64_t policy) {
  uint4 raw;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(at), "l"(policy));
  return raw;
}

__device__ __forceinline__ void store_now(uint4* at, const uint4& raw) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w) : "memory");
}

}  // namespace fuseline
