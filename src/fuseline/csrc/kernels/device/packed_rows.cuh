// Rows that registers hold as they came, in 16-byte vectors, and that are unpacked once more for what is written: in half of the
// registers that fp32 takes, so that more blocks share a multiprocessor and more rows are on their way.
#pragma once

#include "../plans/packed.h"
#include "group.cuh"
#include "vector.cuh"

namespace fuseline {

// Blocks that registers leave room for. Before sm_90 the same code takes a few more.
constexpr int packed_blocks(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return 1;
#else
  return blocks;
#endif
}

// The vectors of a row that a thread has: all of its own but the last, which may be outside the row (packs). Then it reads the
// row's last one, and makes nothing of it.
struct Slots {
  static constexpr int kHeld = kPackedVectors;
  int vectors, last;
  bool has_last;
  __device__ __forceinline__ explicit Slots(int count)
      : vectors(count),
        last(min(int(threadIdx.x) + (kHeld - 1) * int(blockDim.x), count - 1)),
        has_last(int(threadIdx.x) + (kHeld - 1) * int(blockDim.x) < count) {}
  __device__ __forceinline__ int of(int k) const {
    return k < kHeld - 1 ? int(threadIdx.x) + k * int(blockDim.x) : last;
  }
};

// Asked for where it stands: the compilers would rather ask for a row's last vectors once its first ones have been used.
__device__ __forceinline__ uint4 load_now(const uint4* at) {
  uint4 raw;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(at));
  return raw;
}

// The same, and the L2 brings all of its 256 bytes at once. Many rows of softmax, shares of the best peer's speed: past the L1
// (load_once) forward 0.950 at 256 elements of 16 bits and 0.951 at 1,024, backward 0.929, 0.928 and at 4,096 0.911; through it
// 0.975, 0.975, 0.985, 0.981, 0.975; so 0.980, 0.977, 0.992, 0.982. Told to leave the L2 first as past the L1.
__device__ __forceinline__ uint4 load_lines_now(const void* at) {
  uint4 raw;
  asm volatile("ld.global.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(at));
  return raw;
}

}  // namespace fuseline
