// Arrays that do not start at multiples of 16 bytes, read in 16-byte accesses all the same: a thread reads the two vectors of
// memory that its elements stand in and shifts them into place.
#pragma once

#include <type_traits>

#include "group.cuh"
#include "vector.cuh"

namespace fuseline {

// Words `by` .. of `words` to its front; by is at most 2 * kStep - 1, or kStep where that is all there is.
template <int kStep, int kIn>
__device__ __forceinline__ void shift_words(uint32_t (&words)[kIn], int by) {
  const bool shifted = by & kStep;
#pragma unroll
  for (int i = 0; i + kStep < kIn; ++i) words[i] = shifted ? words[i + kStep] : words[i];
  if constexpr (kStep > 1) shift_words<kStep / 2>(words, by);
}

// Elements `by` .. by + kVector of the two vectors low, high; by is at most kVector.
template <class T>
__device__ __forceinline__ uint4 shift_elements(const uint4& low, const uint4& high, int by) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if constexpr (sizeof(T) == 4) {
    shift_words<4>(words, by);
    return make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    // An odd number of 16-bit elements is half a word more. The most there is, 8, is even: no word 8 is needed.
    shift_words<4>(words, by / 2);
    const int bits = by % 2 * 16;
    return make_uint4(__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
                      __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits));
  }
}

}  // namespace fuseline
