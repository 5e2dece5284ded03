// What dropout keeps of the probabilities, as bits: each lane draws blocks of four random words, of runs of keys that are its
// own (attention_scores.cuh), in a rolled loop, since ten rounds of Philox are 60 instructions.
#pragma once

#include "attention_scores.cuh"

namespace fuseline {

// What is kept of elements first .. + kCount; `together`: blocks of words begin at every fourth element from there on.
template <int kCount>
__device__ __forceinline__ uint32_t kept_of_run(const Dropout& dropout, uint64_t seed, int64_t first, bool together) {
  uint32_t bits = 0;
  if (kCount % 4 == 0 && together) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 words = philox_uniform(seed, uint64_t(first + i) / 4);
      bits |= (words.x >= dropout.threshold ? 1u << i : 0u) | (words.y >= dropout.threshold ? 2u << i : 0u) |
              (words.z >= dropout.threshold ? 4u << i : 0u) | (words.w >= dropout.threshold ? 8u << i : 0u);
    }
  } else if (kCount == 2 && together) {  // half a block
    const uint4 words = philox_uniform(seed, uint64_t(first) / 4);
    bits = ((first & 2 ? words.z : words.x) >= dropout.threshold ? 1u : 0u) |
           ((first & 2 ? words.w : words.y) >= dropout.threshold ? 2u : 0u);
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) bits |= (dropout_multiplier(dropout, seed, first + i) != 0.f ? 1u : 0u) << i;
  }
  return bits;
}

template <bool kTurned, int kM, int kN>
struct KeptElements {
  static constexpr int kRun = kTurned ? KeyRows<kM>::kRun : KeyColumns<kN>::kRun;
  static constexpr int kBits = 4 * kM * kN, kWords = (kBits + 31) / 32;
  uint32_t words[kWords];

  __device__ __forceinline__ void draw(const Attention& a, const Place& place) {
    const uint64_t seed = uint64_t(*a.dropout.seed);
    const fuseline_attention& c = a.call;
    const bool together = c.seqlen_k % 4 == 0 && (place.sequence.first_key + place.key) % 4 == 0;
    const Element<kTurned, kM, kN> at(place, 0, 0, 0);
    const int64_t origin = place.sequence.random(c, place.head, 0) + at.key;
    constexpr int kRunsAWord = (kBits < 32 ? kBits : 32) / kRun;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t bits = 0;
#pragma unroll 1
      for (int i = 0; i < kRunsAWord; ++i) {
        const int run = word * kRunsAWord + i;
        int down, along;  // of the run
        if (kTurned) {
          down = run / 2 * 8 + run % 2, along = 0;
        } else {
          constexpr int kRuns = 2 * kN / kRun;  // of a row
          down = run / kRuns * 8, along = run % kRuns * 4 * kRun;
        }
        const int64_t first = origin + (at.row + down) * c.seqlen_k + along;
        bits |= kept_of_run<kRun>(a.dropout, seed, first, together) << (i * kRun);
      }
      words[word] = bits;
    }
  }

  __device__ __forceinline__ bool operator()(int m, int n, int e) const {
    int run, i;
    if (kTurned) {
      run = 2 * n + e % 2, i = 2 * m + e / 2;
    } else {
      run = (2 * m + e / 2) * (2 * kN / kRun) + n / (kRun / 2), i = n % (kRun / 2) * 2 + e % 2;
    }
    const int bit = run * kRun + i;
    return words[bit / 32] >> (bit % 32) & 1;
  }
};

}  // namespace fuseline
