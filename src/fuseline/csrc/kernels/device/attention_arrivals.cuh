// Which of several blocks comes last to a place, to take up what all have left.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fuseline {

// It stands in memory that may hold anything: one of the blocks, that no other has to wait for, opens it; who comes last
// closes it, so that no later launch finds it open.
struct Arrivals {
  uint64_t opened;  // key() while it is
  unsigned count;

  __device__ __forceinline__ uint64_t key() const { return reinterpret_cast<uint64_t>(this) ^ 0x9E3779B97F4A7C15ull; }
  __device__ __forceinline__ void open() {
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(&count) : "memory");
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&opened), "l"(key()) : "memory");
  }
  // For all threads of a block, once: whether it is the last of `blocks`. It then sees what the others stored before.
  __device__ __forceinline__ bool last(unsigned blocks) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(&opened) : "memory");
      } while (seen != key());
      unsigned before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(&count) : "memory");
      is_last = before + 1 == blocks;
      if (is_last) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&opened), "l"(uint64_t(0)) : "memory");
    }
    __syncthreads();
    return is_last;
  }
};

}  // namespace fuseline
