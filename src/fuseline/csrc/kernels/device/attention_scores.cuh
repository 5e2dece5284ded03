// What happens to scores between the two products: scale, soft cap, mask, the keys' bounds, dropout.
//
// Scores lie as attention_tiles.cuh says, with query rows as rows and keys as columns, or the other way round (kTurned).
#pragma once

#include "attention_call.cuh"
#include "vector.cuh"

namespace fuseline {

// 2^x; of -inf: 0. To two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Exact to rounding for fp32; for 16 bits to 2e-7 of 1.
template <class T>
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return tanhf(x);
  } else {
    return 1.f - __fdividef(2.f, 1.f + power_of_two(fminf(2.f * kLog2E * x, 64.f)));
  }
}

// The warp's place in the scores of a head.
struct Place {
  const Sequence& sequence;
  int head, row, key;  // of this warp's first element
};

// Element (m, n, e) of the lane is score (row, key).
template <bool kTurned>
struct Element {
  int row, key;
  __device__ __forceinline__ Element(const Place& place, int m, int n, int e) {
    const int lane = threadIdx.x % 32;
    const int down = 16 * m + lane / 4 + 8 * (e / 2), along = 8 * n + 2 * (lane % 4) + e % 2;
    row = place.row + (kTurned ? along : down), key = place.key + (kTurned ? down : along);
  }
};

// -inf for keys that bounds hide.
template <bool kTurned, int kM, int kN>
__device__ __forceinline__ void hide_bounds(const Attention& a, const Place& place, float (&scores)[kM][kN][4]) {
  const Sequence& sequence = place.sequence;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // What this row of scores sees of its columns, from the lane's first column on.
      const Element<kTurned> at(place, m, 0, 2 * half);
      const bool there = kTurned ? at.key < sequence.keys : at.row < sequence.rows;
      const int from = kTurned ? sequence.rows_from(a, at.key) - at.row : sequence.keys_from(a, at.row) - at.key;
      const int to = kTurned ? sequence.rows_to(a, at.key) - at.row : sequence.keys_to(a, at.row) - at.key;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + e;
          if (!there || column < from || column >= to) scores[m][n][2 * half + e] = -kInfinity;
        }
    }
}

// Calls change(score, t, s) for every element that stands within the sequence.
template <bool kTurned, int kM, int kN, class Change>
__device__ __forceinline__ void for_each_score(const Place& place, float (&scores)[kM][kN][4], Change&& change) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Element<kTurned> at(place, m, n, e);
        if (at.row < place.sequence.rows && at.key < place.sequence.keys) change(scores[m][n][e], at.row, at.key);
      }
}

// Dot products become scores times log2(e), without the keys' bounds. With a soft cap the derivative of a capped score by
// the uncapped is 1 - tanh^2: it is left in `slopes`, if wanted.
template <class T, bool kTurned, bool kSlopes, int kM, int kN>
__device__ __forceinline__ void finish_scores(const Attention& a, const Place& place, float (&scores)[kM][kN][4],
                                              float (&slopes)[kM][kN][4]) {
  const fuseline_attention& c = a.call;
  const float scale = a.cap > 0.f ? a.scale / a.cap : a.scale_log2, cap = a.cap * kLog2E;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = scores[m][n][e] * scale;
        if (a.cap > 0.f) {
          x = hyperbolic_tangent<T>(x);
          if (kSlopes) slopes[m][n][e] *= fmaf(-x, x, 1.f);
          x *= cap;
        }
        scores[m][n][e] = x;
      }
  if (c.mask_kind == FUSELINE_MASK_NONE) return;
  const int64_t first = place.sequence.mask(c, place.head, 0, 0);
  const int64_t by_row = c.mask_strides[2], by_key = c.mask_strides[3];
  if (c.mask_kind == FUSELINE_MASK_BOOL) {
    const uint8_t* mask = static_cast<const uint8_t*>(c.mask) + first;
    for_each_score<kTurned>(place, scores, [&](float& score, int row, int key) {
      if (__ldg(mask + row * by_row + key * by_key) == 0) score = -kInfinity;
    });
  } else if (c.mask_kind == FUSELINE_MASK_ADD_FP32 || std::is_same_v<T, float>) {
    const float* mask = static_cast<const float*>(c.mask) + first;
    for_each_score<kTurned>(place, scores, [&](float& score, int row, int key) {
      score = fmaf(__ldg(mask + row * by_row + key * by_key), kLog2E, score);
    });
  } else {
    const T* mask = static_cast<const T*>(c.mask) + first;
    for_each_score<kTurned>(place, scores, [&](float& score, int row, int key) {
      score = fmaf(float(mask[row * by_row + key * by_key]), kLog2E, score);
    });
  }
}

// Multipliers of the four elements (m, n, 0 .. 3) of this lane. Lanes that need words of the same four blocks of random
// words compute one each and exchange them.
template <bool kTurned>
__device__ __forceinline__ void dropout_of_four(const Attention& a, const Place& place, uint64_t seed, bool together,
                                                int m, int n, float (&multipliers)[4]) {
  const fuseline_attention& c = a.call;
  const int64_t first = place.sequence.random(c, place.head, 0);
  uint32_t words[4];
  if (together) {
    const int lane = threadIdx.x % 32;
    if (!kTurned) {  // keys 8 n + 4 (quad / 2) .. + 3, of row group by the even lanes and of group + 8 by the odd
      const bool odd = lane & 1;
      const int row = place.row + 16 * m + lane / 4 + (odd ? 8 : 0), key = place.key + 8 * n + (lane & 2) * 2;
      const uint4 own = philox_uniform(seed, uint64_t(first + row * c.seqlen_k + key) / 4);
      const uint32_t other0 = __shfl_xor_sync(0xffffffffu, odd ? own.x : own.z, 1);
      const uint32_t other1 = __shfl_xor_sync(0xffffffffu, odd ? own.y : own.w, 1);
      words[0] = odd ? other0 : own.x, words[1] = odd ? other1 : own.y;
      words[2] = odd ? own.z : other0, words[3] = odd ? own.w : other1;
    } else {  // lane i of four computes keys 4 (group / 4) .. + 3 of element i; then words and lanes change places
      const int i = lane / 4 % 4;
      const int row = place.row + 8 * n + 2 * (lane % 4) + i % 2, key = place.key + 16 * m + 8 * (i / 2) + lane / 16 * 4;
      const uint4 own = philox_uniform(seed, uint64_t(first + row * c.seqlen_k + key) / 4);
      const bool odd = i & 1, high = i & 2;
      const uint32_t one = __shfl_xor_sync(0xffffffffu, odd ? own.x : own.y, 4);
      const uint32_t two = __shfl_xor_sync(0xffffffffu, odd ? own.z : own.w, 4);
      const uint32_t w0 = odd ? one : own.x, w1 = odd ? own.y : one, w2 = odd ? two : own.z, w3 = odd ? own.w : two;
      const uint32_t three = __shfl_xor_sync(0xffffffffu, high ? w0 : w2, 8);
      const uint32_t four = __shfl_xor_sync(0xffffffffu, high ? w1 : w3, 8);
      words[0] = high ? three : w0, words[1] = high ? four : w1;
      words[2] = high ? w2 : three, words[3] = high ? w3 : four;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) multipliers[e] = words[e] >= a.dropout.threshold ? a.dropout.scale : 0.f;
  } else {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const Element<kTurned> one(place, m, n, 0), two(place, m, n, 1), three(place, m, n, 2), four(place, m, n, 3);
      const int row0 = half ? three.row : one.row, key0 = half ? three.key : one.key;
      const int row1 = half ? four.row : two.row, key1 = half ? four.key : two.key;
      const float x = dropout_multiplier(a.dropout, seed, first + row0 * c.seqlen_k + key0);
      const float y = dropout_multiplier(a.dropout, seed, first + row1 * c.seqlen_k + key1);
      multipliers[0] = half ? multipliers[0] : x, multipliers[1] = half ? multipliers[1] : y;
      multipliers[2] = x, multipliers[3] = y;
    }
  }
}

// Blocks of four random words begin at every fourth key of each row.
__device__ __forceinline__ bool drops_together(const Attention& a, const Place& place) {
  return a.call.seqlen_k % 4 == 0 && (place.sequence.first_key + place.key) % 4 == 0;
}

}  // namespace fuseline
