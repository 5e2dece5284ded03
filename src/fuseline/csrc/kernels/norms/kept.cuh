// Which elements a dropout keeps, a bit each: made while the elements are on their way.
#pragma once

#include "norm.cuh"
#include "device/overlap.cuh"

namespace fuseline {

// Which of elements first .. first + kCount of the tensor a dropout keeps, a bit each; `first` is a multiple of 4.
template <int kCount>
__device__ __forceinline__ uint32_t kept_of(const Dropout& dropout, uint64_t seed, int64_t first) {
  uint32_t bits[kCount], kept = 0;
  random_bits(seed, first, bits);
#pragma unroll
  for (int i = 0; i < kCount; ++i) kept |= (bits[i] >= dropout.threshold ? 1u : 0u) << i;
  return kept;
}

// Which elements of a thread's slots a dropout keeps, a bit each; `first` is a multiple of 4.
template <int kSize, int kSlots>
__device__ __forceinline__ uint32_t kept_of_slots(const Dropout& dropout, uint64_t seed, int64_t first, int step) {
  uint32_t kept = 0;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    kept |= kept_of<kSize>(dropout, seed, first + k * step) << (k * kSize);
  }
  make_ready(kept);
  return kept;
}

}  // namespace fuseline
