// How weights of 16, 8 and 4 bits become the A of tensor-core products (mma.cuh): exactly, in registers.
//
// A step is 16 columns of a tile of 16 rows. Which of a tile's columns stand for columns 0 .. 15 of the product is free
// as long as the activations agree: lane 4 g + q has of each half of 32 columns the eight from 8 q on, so that it reads
// 16 bytes of activations for two steps. fuseline_quant.h has the layouts.
#pragma once

#include "device/mma.cuh"
#include "device/vector.cuh"
#include "plans/linear_sizes.h"

namespace fuseline {

template <class T>
__device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair difference = __hsub2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

template <class T>
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair product = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// (a & mask) | c and (a & mask) ^ c, in one instruction each: the compiler makes two of them where both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t mask, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
  return d;
}

// Two of the number whose last places are integers: 1024 in fp16, 128 in bf16. A small integer, put in its last bits, is
// added to it.
template <class T>
constexpr uint32_t kIntegers = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;

struct Weights16 {
  static constexpr int kFormat = FUSELINE_WEIGHT_16;
  static constexpr int kVectors = tile_vectors(kFormat);
  static constexpr bool kGrouped = false;
};

struct WeightsInt8 {
  static constexpr int kFormat = FUSELINE_WEIGHT_INT8;
  static constexpr int kVectors = tile_vectors(kFormat);
  static constexpr bool kGrouped = false;

  // Bytes 0 and 2 of a word as two elements of T.
  template <class T>
  __device__ static __forceinline__ uint32_t even_bytes(uint32_t word) {
    if constexpr (std::is_same_v<T, __half>) {
      return minus<T>(and_xor(word, 0x00ff00ffu, 0x64806480u), 0x64806480u);  // 1152 + q - 1152
    } else {
      // Seven bits after 128; the sign bit turns 128 into 256.
      return minus<T>(and_or(word, 0x007f007fu, 0x43004300u), and_or(word, 0x00800080u, 0x43004300u));
    }
  }

  template <class T>
  __device__ static __forceinline__ void step(uint32_t (&a)[4], uint32_t low, uint32_t high) {
    a[0] = even_bytes<T>(low);
    a[1] = even_bytes<T>(low >> 8);
    a[2] = even_bytes<T>(high);
    a[3] = even_bytes<T>(high >> 8);
  }
};

struct WeightsInt4 {
  static constexpr int kFormat = FUSELINE_WEIGHT_INT4;
  static constexpr int kVectors = tile_vectors(kFormat);
  static constexpr bool kGrouped = true;

  // zero[0], of row g, and zero[1], of row g + 8: kIntegers plus the zero point, twice.
  template <class T>
  __device__ static __forceinline__ void step(uint32_t (&a)[4], uint32_t word, const uint32_t (&zero)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = minus<T>(and_or(word >> (4 * i), 0x000f000fu, kIntegers<T>), zero[i % 2]);
    }
  }
};

}  // namespace fuseline
