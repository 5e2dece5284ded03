// Rows that do not start at multiples of 16 bytes, moved in 16-byte accesses all the same: a thread reads the two
// vectors of memory that its elements stand in and shifts them into place, and to write it shifts its elements against
// those of the lane before. So threads own the same elements wherever a row stands, and sums have the same bits.
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

template <class T>
__device__ __forceinline__ void store_word(T* at, const uint4& words, int i) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  const uint32_t bits = word[i * int(sizeof(T)) / 4];
  *reinterpret_cast<Bits*>(at) = Bits(sizeof(T) == 4 ? bits : bits >> (16 * (i % 2)));
}

// Writes elements first .. first + kVector of a row that starts `head` elements into a vector of memory, where inside
// 0 .. n. Lanes side by side, `width` of them, have elements side by side; all of a warp call.
template <class T>
__device__ __forceinline__ void store_shifted(T* row, int head, int first, int n, const uint4& mine, int width) {
  constexpr int kSize = kVector<T>;
  const int lane = int(threadIdx.x) % width;
  if (head == 0) {  // the same for all lanes of a row, but not of a warp
    if (first + kSize <= n) {
      *reinterpret_cast<uint4*>(row + first) = mine;
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (first + i < n) store_word(row + first + i, mine, i);
      }
    }
  }
  uint4 before;
  before.x = __shfl_up_sync(kAllLanes, mine.x, 1);
  before.y = __shfl_up_sync(kAllLanes, mine.y, 1);
  before.z = __shfl_up_sync(kAllLanes, mine.z, 1);
  before.w = __shfl_up_sync(kAllLanes, mine.w, 1);
  if (head == 0) return;
  // The vector of memory that this thread's first element stands in.
  const uint4 vector = shift_elements<T>(before, mine, kSize - head);
  const int from = first - head;
  if (lane > 0 && from + kSize <= n) {
    *reinterpret_cast<uint4*>(row + from) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if ((lane > 0 || i >= head) && from + i < n) store_word(row + from + i, vector, i);
    }
  }
  if (lane == width - 1) {  // nobody comes after to write the rest of this one's elements
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i >= kSize - head && first + i < n) store_word(row + first + i, mine, i);
    }
  }
}

}  // namespace fuseline
