// Random bits that are a function of a seed and a position, so that a dropout mask is computed anew where it is needed
// and never stored: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// The element at flat index i of a contiguous tensor takes word i % 4 of block i / 4. ops/philox.py is the same in
// PyTorch, and csrc/torch/cpu/philox.h for the CPU.
#pragma once

#include <cstdint>

namespace fuseline {

// Four words for elements 4 * block .. 4 * block + 3. About 40 instructions; the keys are the same for all threads.
// Halves of products are asked for one by one: of a 64-bit product the compiler adds a zero to each upper half.
__device__ __forceinline__ uint4 philox_uniform(uint64_t seed, uint64_t block) {
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  uint32_t c0 = uint32_t(block), c1 = uint32_t(block >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
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

// What dropout with probability p does to an element: nothing is left where its word is under `threshold`, and
// elsewhere it is multiplied by `scale` = 1 / (1 - p).
struct Dropout {
  const int64_t* seed;  // one element, on the device; null for no dropout
  uint32_t threshold;
  float scale;
};

inline Dropout dropout_of(const int64_t* seed, double p) {
  const double words = p * 4294967296.0 + 0.5;
  Dropout dropout{};
  dropout.seed = p > 0 ? seed : nullptr;
  dropout.threshold = words >= 4294967295.0 ? 0xffffffffu : uint32_t(words);
  dropout.scale = p < 1 ? float(1.0 / (1.0 - p)) : 0.f;
  return dropout;
}

// Multipliers (0 or scale) of elements first .. first + kCount of the tensor; `first` is a multiple of 4.
template <int kCount>
__device__ __forceinline__ void dropout_multipliers(const Dropout& dropout, uint64_t seed, int64_t first,
                                                    float (&multipliers)[kCount]) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const uint4 bits = philox_uniform(seed, uint64_t(first + i) / 4);
    multipliers[i] = bits.x >= dropout.threshold ? dropout.scale : 0.f;
    multipliers[i + 1] = bits.y >= dropout.threshold ? dropout.scale : 0.f;
    multipliers[i + 2] = bits.z >= dropout.threshold ? dropout.scale : 0.f;
    multipliers[i + 3] = bits.w >= dropout.threshold ? dropout.scale : 0.f;
  }
}

// The multiplier of one element, wherever it stands.
__device__ __forceinline__ float dropout_multiplier(const Dropout& dropout, uint64_t seed, int64_t index) {
  const uint4 bits = philox_uniform(seed, uint64_t(index) / 4);
  const uint32_t low = index & 1 ? bits.y : bits.x, high = index & 1 ? bits.w : bits.z;
  return (index & 2 ? high : low) >= dropout.threshold ? dropout.scale : 0.f;
}

}  // namespace fuseline
