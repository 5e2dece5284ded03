// What the forward and the backward of the embedding share: the multipliers of dropout, the width of their accesses, and
// what is too large for them.
#pragma once

#include "device/elementwise.cuh"
#include "device/philox.cuh"
#include "plans/embedding.h"

#include <initializer_list>

namespace fuseline {

// Multipliers of dropout for columns first .. first + kWide of a row; 1 without dropout.
template <int kWide>
__device__ __forceinline__ void multipliers(const Dropout& dropout, uint64_t seed, int64_t first,
                                            float (&result)[kWide]) {
  if (!dropout.seed) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) result[i] = 1.f;
  } else if constexpr (kWide % 4 == 0) {
    dropout_multipliers(dropout, seed, first, result);
  } else {
    result[0] = dropout_multiplier(dropout, seed, first);
  }
}

__device__ __forceinline__ uint64_t seed_of(const Dropout& dropout) {
  return dropout.seed ? uint64_t(__ldg(dropout.seed)) : 0;
}

// Calls run(width) with 16-byte accesses where rows and all pointers keep to them.
template <class T, class Run>
int with_width(int64_t n, std::initializer_list<const void*> pointers, Run&& run) {
  bool vectors = n % kVector<T> == 0;
  for (const void* pointer : pointers) vectors = vectors && offset_in_vector(pointer) == 0;
  return vectors ? run(std::integral_constant<int, kVector<T>>{}) : run(std::integral_constant<int, 1>{});
}

inline bool too_many(int64_t items, int64_t n) { return items >= 0xffffff00ll || items * divide_up(n, 8) >= (1ll << 38); }

}  // namespace fuseline
