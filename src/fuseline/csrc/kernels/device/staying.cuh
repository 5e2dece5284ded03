// Rows that pass through shared memory on their way to the registers of blocks that stay: while a block computes one
// row, the next are on their way, and HBM never waits for a reduction. Each thread copies exactly what it will read.
#pragma once

#include "ring.cuh"
#include "vector.cuh"

namespace fuseline {

// This thread's kHeld vectors of a row of n elements at `row` into its slots `to`, `slot_step` apart: those that start
// at elements first, first + step, .. Slots of vectors that are outside the row are left as they are.
template <class T, int kHeld>
__device__ __forceinline__ void fetch_vectors(uint4* to, int slot_step, const T* row, int first, int step, int n) {
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int from = first + k * step;
    if (from >= 0 && from + kVector<T> <= n) {
      copy_async<16>(to + k * slot_step, row + from, true);
    } else if (from < n && from + kVector<T> > 0) {
      to[k * slot_step] = load_vector<T, false>(row, from, n, false);  // at an end of the row, by elements
    }
  }
}

// The same vectors out of the slots, once they have arrived; zeros outside the row.
template <class T, int kHeld>
__device__ __forceinline__ void take_vectors(const uint4* from_slots, int slot_step, int first, int step, int n,
                                             uint4 (&raw)[kHeld]) {
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int from = first + k * step;
    raw[k] = from < n && from + kVector<T> > 0 ? from_slots[k * slot_step] : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace fuseline
