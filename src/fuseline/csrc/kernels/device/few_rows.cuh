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

__device__ __forceinline__ void store_now(uint4* at, const uint4& raw) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w) : "memory");
}

}  // namespace fuseline
