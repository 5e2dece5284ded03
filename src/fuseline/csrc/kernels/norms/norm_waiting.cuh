// Long rows of the norms' forward, which wait in shared memory until their moments have met, with blocks that end with
// them. Each thread copies exactly the vectors that it will read, of all tensors, all at once, and takes them piece by
// piece as they arrive.
#pragma once

#include "../plans/waiting.h"
#include "device/launch.cuh"
#include "device/ring.cuh"

namespace fuseline {

// The part of block `rank` of a row of n elements, neighbouring vectors: the first of this thread, and the end of all.
template <class T>
__device__ __forceinline__ void divide_row(const T* row, int n, int rank, int blocks, int lane, int& begin, int& end) {
  constexpr int kSize = kVector<T>;
  const int head = elements_into_vector(row);
  const int each = ((n + head + kSize - 1) / kSize + blocks - 1) / blocks;
  begin = (rank * each + lane) * kSize - head;
  end = min((rank + 1) * each * kSize - head, n);
}

// The next piece, once it has arrived: with one more group of copies each time, an empty one, it has when all but the
// last kPieces groups have.
__device__ __forceinline__ void wait_for_piece(const uint4* slots, int threads, int first, int end, int step,
                                               uint4 (&raw)[kPiece]) {
  commit_copies();
  asm volatile("cp.async.wait_group %0;" ::"n"(kPieces) : "memory");
#pragma unroll
  for (int k = 0; k < kPiece; ++k) {
    raw[k] = first + k * step < end ? slots[k * threads] : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace fuseline
