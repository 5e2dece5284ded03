// Random bits that are a function of a seed and a position, so that a dropout mask is computed anew where it is needed
// and never stored: Philox-4x32-7 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, of which
// seven rounds pass every test of BigCrush).
//
// The element at flat index i of a contiguous tensor takes 16 bits of block i / 8: of word i % 4 the upper half if i % 8 < 4,
// else the lower one. ops/philox.py is the same in PyTorch, and csrc/torch/cpu/philox.h for the CPU.
#pragma once

#include <cstdint>

namespace fuseline {

// A block's four words. About 30 instructions; the keys are the same for all threads.
// Halves of products are asked for one by one: of a 64-bit product the compiler adds a zero to each upper half.
__device__ __forceinline__ uint4 philox_uniform(uint64_t seed, uint64_t block) {
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  uint32_t c0 = uint32_t(block), c1 = uint32_t(block >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint32_t low_a = c0 * 0xD2511F53u, high_a = __umulhi(c0, 0xD2511F53u);
    const uint32_t low_b = c2 * 0xCD9E8D57u, high_b = __umulhi(c2, 0xCD9E8D57u);
    c0 = high_b ^ c1 ^ key0;
    c1 = low_b;
    c2 = high_a ^ c3 ^ key1;
    c3 = low_a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// The 16 bits of elements first .. first + kCount, each at the top of a word; `first` is a multiple of 4.
template <int kCount>
__device__ __forceinline__ void random_bits(uint64_t seed, int64_t first, uint32_t (&bits)[kCount]) {
  static_assert(kCount % 4 == 0);
  if constexpr (kCount % 8 == 0) {
    if (first % 8 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += 8) {
        const uint4 words = philox_uniform(seed, uint64_t(first + i) / 8);
        bits[i] = words.x, bits[i + 1] = words.y, bits[i + 2] = words.z, bits[i + 3] = words.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[i + 4 + j] = bits[i + j] << 16;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const uint4 words = philox_uniform(seed, uint64_t((first + i) >> 3));
    const int lower = int(first + i & 4) * 4;
    bits[i] = words.x << lower, bits[i + 1] = words.y << lower, bits[i + 2] = words.z << lower, bits[i + 3] = words.w << lower;
  }
}

// What dropout with probability p, to the nearest 2^-16, does to an element: nothing is left where its bits are under
// `threshold`, and elsewhere it is multiplied by `scale` = 1 / (1 - p).
struct Dropout {
  const int64_t* seed;  // one element, on the device; null for no dropout
  uint32_t threshold;   // at the top of the word
  float scale;
};

inline Dropout dropout_of(const int64_t* seed, double p) {
  const double parts = p * 65536.0 + 0.5;
  const uint32_t dropped = parts >= 65535.0 ? 65535u : uint32_t(parts);
  Dropout dropout{};
  dropout.seed = p > 0 ? seed : nullptr;
  dropout.threshold = p < 1 ? dropped << 16 : 0xffffffffu;
  dropout.scale = p < 1 ? float(65536.0 / (65536.0 - dropped)) : 0.f;
  return dropout;
}

// Multipliers (0 or scale) of elements first .. first + kCount of the tensor; `first` is a multiple of 4.
template <int kCount>
__device__ __forceinline__ void dropout_multipliers(const Dropout& dropout, uint64_t seed, int64_t first,
                                                    float (&multipliers)[kCount]) {
  uint32_t bits[kCount];
  random_bits(seed, first, bits);
#pragma unroll
  for (int i = 0; i < kCount; ++i) multipliers[i] = bits[i] >= dropout.threshold ? dropout.scale : 0.f;
}

// What is kept of the eight elements of a block, a bit each.
__device__ __forceinline__ uint32_t kept_of_block(const Dropout& dropout, uint64_t seed, uint64_t block) {
  const uint4 random = philox_uniform(seed, block);
  const uint32_t words[4] = {random.x, random.y, random.z, random.w};
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) bits |= (words[i % 4] << i / 4 * 16 >= dropout.threshold ? 1u : 0u) << i;
  return bits;
}

// The multiplier of one element, wherever it stands.
__device__ __forceinline__ float dropout_multiplier(const Dropout& dropout, uint64_t seed, int64_t index) {
  uint32_t bits[4];
  random_bits(seed, index & ~int64_t(3), bits);
  const uint32_t low = index & 1 ? bits[1] : bits[0], high = index & 1 ? bits[3] : bits[2];
  return (index & 2 ? high : low) >= dropout.threshold ? dropout.scale : 0.f;
}

}  // namespace fuseline
