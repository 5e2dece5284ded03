// Asynchronous copies from HBM to shared memory in which every thread waits only for its own: it copies exactly the
// bytes that it will read, so a ring of rows runs ahead of the arithmetic without a barrier between the threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fuseline {

// Copies kBytes (4, 8 or 16, both sides multiples of it), or writes zeros if not `wanted`.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool wanted) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
  const int bytes = wanted ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

constexpr int kMostStages = 4;

// Waits until all but the last `stages` - 1 committed groups of this thread have arrived.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  static_assert(kMostStages == 4);
  if (stages == 4) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  } else if (stages == 3) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (stages == 2) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

__device__ __forceinline__ void wait_for_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

}  // namespace fuseline
