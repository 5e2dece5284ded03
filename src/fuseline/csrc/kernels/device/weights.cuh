// Weights of a norm, in the dtype of the rows or in fp32 (as autocast leaves them).
#pragma once

#include "vector.cuh"

namespace fuseline {

// Weights first .. first + kCount. kVectors: they are all inside the array, which starts at a multiple of 16 bytes, and
// first is a multiple of kCount. Otherwise those outside 0 .. n are left as they are. The branch on the dtype is the
// same for all threads: cheaper than a kernel for each dtype.
template <class T, bool kVectors, int kCount, class Index>
__device__ __forceinline__ void load_weights(const void* weights, bool fp32, Index first, Index n,
                                             float (&values)[kCount]) {
  if constexpr (kVectors) {
    if (fp32) {
      load_reused<float>(static_cast<const float*>(weights) + first, values);
    } else {
      load_reused<T>(static_cast<const T*>(weights) + first, values);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Index j = first + i;
      if (j < 0 || j >= n) continue;
      values[i] = fp32 ? static_cast<const float*>(weights)[j] : to_float(static_cast<const T*>(weights)[j]);
    }
  }
}

}  // namespace fuseline
