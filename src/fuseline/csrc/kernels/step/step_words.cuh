// A whole decoding step (step_kernel.cuh): elements that blocks hand to each other, each with its layer's number.
#pragma once

#include "step_arguments.cuh"

namespace fuseline {

__device__ __forceinline__ void send(uint64_t* to, float value, uint32_t number) {
  const uint64_t word = uint64_t(number) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

template <class T>
__device__ __forceinline__ void send(uint32_t* to, T value, uint32_t number) {
  const uint32_t word = number << 16 | uint32_t(*reinterpret_cast<const uint16_t*>(&value));
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint64_t look(const uint64_t* at) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

__device__ __forceinline__ uint32_t look(const uint32_t* at) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  return word;
}

__device__ __forceinline__ uint4 look_at_four(const uint32_t* at) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at)
               : "memory");
  return words;
}

// The thread, as if it were another each time: what is worked out of it is worked out where it is wanted, since registers
// that held it from layer to layer would be wanting elsewhere.
__device__ __forceinline__ int thread_anew() {
  int thread = int(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

// Looks again and again until `there()`; what does not come for many seconds never will, and an error is better than
// a device that hangs.
template <class There>
__device__ __forceinline__ void until(const There& there) {
  for (uint32_t looks = 0; !there(); ++looks) {
    if (looks > 1u << 25) __trap();
  }
}

template <class T>
__device__ __forceinline__ T element_of(uint32_t word) {
  const uint16_t bits = uint16_t(word);
  return *reinterpret_cast<const T*>(&bits);
}

// Elements thread, thread + kThreads, .. of n.
template <int kEach, int kThreads>
__device__ __forceinline__ void receive(const uint64_t* from, int n, uint32_t number, float (&values)[kEach]) {
  until([&] {
    bool there = true;
    uint64_t words[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = int(threadIdx.x) + i * kThreads;
      words[i] = at < n ? look(from + at) : uint64_t(number) << 32;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      there = there && uint32_t(words[i] >> 32) == number;
      values[i] = __uint_as_float(uint32_t(words[i]));
    }
    return there;
  });
}

// n elements, a multiple of 4, to shared memory.
template <class T, int kThreads>
__device__ __forceinline__ void receive_rounded(const uint32_t* from, int n, uint32_t number, T* to) {
  for (int at = int(threadIdx.x) * 4; at < n; at += kThreads * 4) {
    uint4 words;
    until([&] {
      words = look_at_four(from + at);
      const uint32_t wrong = (words.x >> 16 ^ number) | (words.y >> 16 ^ number) | (words.z >> 16 ^ number) |
                             (words.w >> 16 ^ number);
      return (wrong & 0xffffu) == 0;
    });
    const uint2 pairs = make_uint2(words.x & 0xffffu | words.y << 16, words.z & 0xffffu | words.w << 16);
    *reinterpret_cast<uint2*>(to + at) = pairs;
  }
}

// Of logits the larger comes after, and of equal ones that of the lower row; 16 bits over 24.
template <class T>
__device__ __forceinline__ unsigned long long ranked(T logit, int row) {
  static_assert(sizeof(T) == 2);
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(&logit);
  const uint32_t ordered = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
  return static_cast<unsigned long long>(ordered) << 24 | (0xffffffu - uint32_t(row));
}

__device__ __forceinline__ int64_t row_of(unsigned long long rank) { return 0xffffff - int64_t(rank & 0xffffffu); }

// The same with 24 bits of a number before it.
__device__ __forceinline__ void send_ranked(uint64_t* to, unsigned long long rank, uint32_t number) {
  const uint64_t word = uint64_t(number) << 40 | rank;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ unsigned long long receive_ranked(const uint64_t* from, uint32_t number) {
  uint64_t word;
  until([&] {
    word = look(from);
    return ((uint32_t(word >> 40) ^ number) & 0xffffffu) == 0;
  });
  return word & 0xffffffffffu;
}

}  // namespace fuseline
