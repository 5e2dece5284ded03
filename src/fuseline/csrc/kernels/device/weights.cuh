// Weights of a norm, in the dtype of the rows or in fp32 (as autocast leaves them).
#pragma once

#include "shifted.cuh"
#include "vector.cuh"

namespace fuseline {

// Elements first .. first + kCount of an array of n at any address, in 16-byte accesses; zeros outside of it.
template <class T, int kCount, class Index>
__device__ __forceinline__ void load_across(const T* array, Index first, Index n, float (&values)[kCount]) {
  constexpr int kSize = kVector<T>, kVectors = (kCount + kSize - 1) / kSize;
  const int by = elements_into_vector(array + first);
  if (by * int(sizeof(T)) % (kCount * int(sizeof(T)) < 16 ? 8 : 16) == 0 && first >= 0 && first + kCount <= n) {
    load_reused<T>(array + first, values);
    return;
  }
  uint4 raw[kVectors + 1];
#pragma unroll
  for (int v = 0; v <= kVectors; ++v) {
    const Index from = first - by + v * kSize;
    raw[v] = make_uint4(0, 0, 0, 0);
    if (from >= n || from + kSize <= 0 || (v == kVectors && by == 0)) continue;
    raw[v] = from >= 0 && from + kSize <= n ? __ldg(reinterpret_cast<const uint4*>(array + from))
                                            : load_vector<T, false>(array, from, n, false);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float part[kSize];
    unpack<T>(shift_elements<T>(raw[v], raw[v + 1], by), part);
#pragma unroll
    for (int i = 0; i < kSize && v * kSize + i < kCount; ++i) values[v * kSize + i] = part[i];
  }
}

// Weights first .. first + kCount. kVectors: they are all inside the array, which starts at a multiple of 16 bytes, and
// first is a multiple of kCount. Otherwise those outside 0 .. n are zeros. The branch on the dtype is the same for all
// threads: cheaper than a kernel for each dtype.
template <class T, bool kVectors, int kCount, class Index>
__device__ __forceinline__ void load_weights(const void* weights, bool fp32, Index first, Index n,
                                             float (&values)[kCount]) {
  if constexpr (kVectors) {
    if (fp32) {
      load_reused<float>(static_cast<const float*>(weights) + first, values);
    } else {
      load_reused<T>(static_cast<const T*>(weights) + first, values);
    }
  } else if (fp32) {
    load_across<float>(static_cast<const float*>(weights), first, n, values);
  } else {
    load_across<T>(static_cast<const T*>(weights), first, n, values);
  }
}

// Weight number `i`.
template <class T>
__device__ __forceinline__ float weight_at(const void* weights, bool fp32, int i) {
  return fp32 ? static_cast<const float*>(weights)[i] : to_float(static_cast<const T*>(weights)[i]);
}

}  // namespace fuseline
