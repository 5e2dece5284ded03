// What dropout keeps of the probabilities, as bits: each lane draws blocks of four random words, of runs of keys that are its
// own (attention_scores.cuh), in a rolled loop, since a block of Philox is 30 instructions.
#pragma once

#include "attention_scores.cuh"

namespace fuseline {

// What is kept of elements first .. + kCount; `together`: blocks of words begin at every fourth element from there on.
template <int kCount>
__device__ __forceinline__ uint32_t kept_of_run(const Dropout& dropout, uint64_t seed, int64_t first, bool together) {
  uint32_t bits = 0;
  if constexpr (kCount % 4 == 0) {
    if (together) {
      uint32_t words[kCount];
      random_bits(seed, first, words);
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits |= (words[i] >= dropout.threshold ? 1u : 0u) << i;
      return bits;
    }
  }
  if (kCount == 2 && together) {  // half of four
    uint32_t words[4];
    random_bits(seed, first & ~int64_t(3), words);
    bits = ((first & 2 ? words[2] : words[0]) >= dropout.threshold ? 1u : 0u) |
           ((first & 2 ? words[3] : words[1]) >= dropout.threshold ? 2u : 0u);
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
    if constexpr (!kTurned && kRun == 8) {
      if (c.seqlen_k % 8 == 0 && (place.sequence.first_key + place.key) % 8 == 0) {  // runs are blocks
        const unsigned blocks_a_row = unsigned(c.seqlen_k) / 8;
        const uint64_t block = (uint64_t(origin) >> 3) + uint64_t(unsigned(at.row)) * blocks_a_row;
        constexpr int kRuns = 2 * kN / kRun;  // of a row
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          words[word] = 0;
#pragma unroll
          for (int i = 0; i < kRunsAWord; ++i) {
            const int run = word * kRunsAWord + i;
            const unsigned further = unsigned(run / kRuns * 8) * blocks_a_row + unsigned(run % kRuns * 4);
            words[word] |= kept_of_block(a.dropout, seed, block + further) << (i * kRun);
          }
        }
        return;
      }
    }
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
