// What happens to scores between the two products: scale, soft cap, mask, the keys' bounds, dropout.
//
// Scores lie as attention_tiles.cuh says, with query rows as rows and keys as columns, or the other way round (kTurned).
#pragma once

#include "attention_call.cuh"
#include "attention_tiles.cuh"

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
  int head, row, key;           // of this warp's first element
  const unsigned char* mask;    // of that element in a mask tile in shared memory; null: read the mask where it lies
  int mask_pitch;               // bytes from row to row there
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

template <class T>
__device__ __forceinline__ int mask_element_size(const fuseline_attention& c) {
  return c.mask_kind == FUSELINE_MASK_BOOL ? 1 : c.mask_kind == FUSELINE_MASK_ADD ? int(sizeof(T)) : 4;
}

// Tiles of the mask come to shared memory with the keys if its rows can be copied in 16 bytes.
template <class T, int kRows, int kKeys>
struct MaskTile {
  static constexpr int kBytes = kRows * (kKeys * 4 + 16);  // of the widest elements
  bool copied;
  int size, pitch;  // bytes; one row serves all where the mask has only one

  __device__ __forceinline__ MaskTile(const Attention& a, const Sequence& sequence) {
    const fuseline_attention& c = a.call;
    size = mask_element_size<T>(c);
    pitch = c.mask_strides[2] == 0 ? 0 : kKeys * size + 16;
    const int64_t start = int64_t(reinterpret_cast<uintptr_t>(c.mask)) + sequence.mask(c, 0, 0, 0) * size;
    copied = c.mask_kind != FUSELINE_MASK_NONE && c.mask_strides[3] == 1 &&
             (start | c.mask_strides[1] * size | c.mask_strides[2] * size) % 16 == 0;
  }

  template <int kThreads>
  __device__ __forceinline__ void copy(unsigned char* tile, const Attention& a, const Sequence& sequence, int head,
                                       int row, int key) const {
    const fuseline_attention& c = a.call;
    const unsigned char* from =
        static_cast<const unsigned char*>(c.mask) + sequence.mask(c, head, row, key) * size;
    const int vectors = kKeys * size / 16, shift = __ffs(vectors) - 1, bytes = (sequence.keys - key) * size;
    const int rows = pitch == 0 ? 1 : kRows;
    for (int at = threadIdx.x; at < rows << shift; at += kThreads) {
      const int down = at >> shift, column = (at & (vectors - 1)) * 16;
      const int there = row + down < sequence.rows ? max(0, min(16, bytes - column)) : 0;
      copy_bytes(tile + down * pitch + column, from + down * c.mask_strides[2] * size + column, there);
    }
  }
};

// Adds the mask to the scores, or hides by it; V is its element.
template <class V, bool kTurned, int kM, int kN>
__device__ __forceinline__ void apply_mask(const Attention& a, const Place& place, float (&scores)[kM][kN][4]) {
  const fuseline_attention& c = a.call;
  const auto apply = [](float& score, V value) {
    if constexpr (sizeof(V) == 1) {
      if (value == 0) score = -kInfinity;
    } else {
      score = fmaf(to_float(value), kLog2E, score);
    }
  };
  const int lane = threadIdx.x % 32, down = lane / 4, along = 2 * (lane % 4);
  if (place.mask != nullptr) {
    const unsigned char* first =
        place.mask + (kTurned ? along : down) * place.mask_pitch + (kTurned ? down : along) * int(sizeof(V));
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int by_m = 16 * m + 8 * half;
          if constexpr (kTurned) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              apply(scores[m][n][2 * half + e],
                    *reinterpret_cast<const V*>(first + (8 * n + e) * place.mask_pitch + by_m * int(sizeof(V))));
            }
          } else {
            struct alignas(2 * sizeof(V)) Pair {
              V x, y;
            };
            const Pair pair = *reinterpret_cast<const Pair*>(first + by_m * place.mask_pitch + 8 * n * int(sizeof(V)));
            apply(scores[m][n][2 * half], pair.x);
            apply(scores[m][n][2 * half + 1], pair.y);
          }
        }
    return;
  }
  const Sequence& sequence = place.sequence;
  const V* const mask = static_cast<const V*>(c.mask) + sequence.mask(c, place.head, 0, 0);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Element<kTurned> at(place, m, n, e);
        if (at.row < sequence.rows && at.key < sequence.keys) {
          apply(scores[m][n][e], mask[at.row * c.mask_strides[2] + at.key * c.mask_strides[3]]);
        }
      }
}

// Dot products become scores times log2(e), without the keys' bounds. With a soft cap the derivative of a capped score by
// the uncapped is 1 - tanh^2: `slopes` are multiplied by it, if wanted.
template <class T, bool kTurned, bool kSlopes, int kM, int kN>
__device__ __forceinline__ void finish_scores(const Attention& a, const Place& place, float (&scores)[kM][kN][4],
                                              float (&slopes)[kM][kN][4]) {
  const float scale = a.cap > 0.f ? a.scale / a.cap : a.scale_log2;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] *= scale;
  if (a.cap > 0.f) {
    const float cap = a.cap * kLog2E;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = hyperbolic_tangent<T>(scores[m][n][e]);
          if (kSlopes) slopes[m][n][e] *= fmaf(-x, x, 1.f);
          scores[m][n][e] = x * cap;
        }
  }
  const int kind = a.call.mask_kind;
  if (kind == FUSELINE_MASK_BOOL) {
    apply_mask<uint8_t, kTurned>(a, place, scores);
  } else if (kind == FUSELINE_MASK_ADD_FP32 || (kind == FUSELINE_MASK_ADD && std::is_same_v<T, float>)) {
    apply_mask<float, kTurned>(a, place, scores);
  } else if (kind == FUSELINE_MASK_ADD) {
    apply_mask<T, kTurned>(a, place, scores);
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
