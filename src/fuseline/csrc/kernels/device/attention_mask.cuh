// The mask of attention: its tiles in shared memory, and how it joins the scores.
#pragma once

#include "attention_scores.cuh"

namespace fuseline {

// Begins to copy a tile of elements V, in vectors, or copies it.
template <class V, int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void copy_mask_of(unsigned char* tile, const Attention& a, const Sequence& sequence, int head,
                                             int row, int key) {
  constexpr int kSize = int(sizeof(V)), kVectors = kKeys * kSize / 16, kStep = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0 && (kRows % kStep == 0 || kStep > kRows) && kKeys % 16 == 0);
  const fuseline_attention& c = a.call;
  const bool one_row = a.mask_tile.pitch == 0;
  constexpr int kPitch = kKeys * kSize + 16;
  const int rows = one_row ? 1 : min(kRows, sequence.rows - row);
  unsigned thread;  // asked for anew, as copy_tile does
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if (!a.mask_tile.in_vectors) {
    const V* const from = static_cast<const V*>(c.mask) + sequence.mask(c, head, row, key);
#pragma unroll 1
    for (int i = int(thread); i < rows * kKeys; i += kThreads) {
      const int down = i / kKeys, along = i % kKeys;
      if (along < sequence.keys - key) {
        *reinterpret_cast<V*>(tile + down * kPitch + along * kSize) =
            from[down * c.mask_strides[2] + along * c.mask_strides[3]];
      }
    }
    return;
  }
  const int down = int(thread / kVectors), column = int(thread % kVectors) * 16;
  const int there = max(0, min(16, (sequence.keys - key) * kSize - column));
  const int64_t stride = c.mask_strides[2] * kSize;
  const unsigned char* from = static_cast<const unsigned char*>(c.mask) + sequence.mask(c, head, row, key) * kSize +
                              down * stride + column;
  unsigned char* const to = tile + down * kPitch + column;
#pragma unroll 4
  for (int i = 0; i < kRows; i += kStep) {
    if (i + down < rows) copy_bytes(to + i * kPitch, from, there);
    from += kStep * stride;
  }
}

// Begins to copy a tile. What stands outside of the sequence is not written: bounds hide it.
template <class T, int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void copy_mask(unsigned char* tile, const Attention& a, const Sequence& sequence, int head,
                                          int row, int key) {
  if (a.mask_tile.size == 2) {
    if constexpr (sizeof(T) == 2) copy_mask_of<T, kRows, kKeys, kThreads>(tile, a, sequence, head, row, key);
  } else if (a.mask_tile.size == 4) {
    copy_mask_of<float, kRows, kKeys, kThreads>(tile, a, sequence, head, row, key);
  } else if (a.mask_tile.size == 1) {
    copy_mask_of<uint8_t, kRows, kKeys, kThreads>(tile, a, sequence, head, row, key);
  }
}

// Where the elements `down` rows and `along` keys from the start of a tile are.
__device__ __forceinline__ const unsigned char* mask_at(const Attention& a, const unsigned char* tile, int down, int along) {
  return tile + down * a.mask_tile.pitch + along * a.mask_tile.size;
}

// Calls change(score, value) for the scores and their mask's values, of type V.
template <class V, bool kTurned, int kM, int kN, class Change>
__device__ __forceinline__ void with_values(const Attention& a, const Place& place, float (&scores)[kM][kN][4],
                                            Change&& change) {
  const int pitch = a.mask_tile.pitch;
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  if constexpr (kTurned) {
    constexpr int kRun = KeyRows<kM>::kRun;
    struct alignas(kRun * sizeof(V)) Run {
      V values[kRun];
    };
    const unsigned char* const first = place.mask + 2 * quad * pitch + group * int(sizeof(Run));
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Run run = *reinterpret_cast<const Run*>(first + (8 * n + e) * pitch);
#pragma unroll
        for (int i = 0; i < kRun; ++i) change(scores[i / 2][n][i % 2 * 2 + e], run.values[i]);
      }
  } else {
    constexpr int kRun = KeyColumns<kN>::kRun, kBytes = kRun * int(sizeof(V));
    struct alignas(kBytes < 16 ? kBytes : 16) Run {
      V values[kRun];
    };
    const unsigned char* const first = place.mask + group * pitch + quad * kBytes;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kN; n += kRun / 2) {
          const Run run =
              *reinterpret_cast<const Run*>(first + (16 * m + 8 * half) * pitch + 8 * n * int(sizeof(V)));
#pragma unroll
          for (int i = 0; i < kRun; ++i) change(scores[m][n + i / 2][2 * half + i % 2], run.values[i]);
        }
  }
}

template <class T, bool kTurned, int kM, int kN, class Change>
__device__ __forceinline__ void with_mask(const Attention& a, const Place& place, float (&scores)[kM][kN][4],
                                          Change&& change) {
  if (a.mask_tile.size == 1) {
    with_values<uint8_t, kTurned>(a, place, scores, change);
  } else if (a.mask_tile.size == 4) {
    with_values<float, kTurned>(a, place, scores, change);
  } else if (a.mask_tile.size == 2) {
    if constexpr (sizeof(T) == 2) with_values<T, kTurned>(a, place, scores, change);
  }
}

// Whether scale * log2(e) times a score is what a power of two is taken of, as with plain scores: the mask joins the dot
// products divided by the scale. Not with a soft cap, behind which the mask comes, nor for a scale that turns the order round.
__device__ __forceinline__ bool keeps_dots(const Attention& a) { return a.cap == 0.f && a.scale > 0.f; }

// Dot products become scores, without the keys' bounds: in that unit, or else times log2(e). With a soft cap the derivative
// of a capped score by the uncapped is 1 - tanh^2: `slopes` are multiplied by it, if wanted.
template <class T, bool kTurned, bool kSlopes, int kM, int kN>
__device__ __forceinline__ void finish_scores(const Attention& a, const Place& place, float (&scores)[kM][kN][4],
                                              float (&slopes)[kM][kN][4]) {
  float factor = a.inverse_scale;
  if (!keeps_dots(a)) {
    factor = kLog2E;
    if (a.cap > 0.f) {
      const float scale = a.scale / a.cap, cap = a.cap * kLog2E;
      each_element<kM, kN>([&](int m, int n, int e) {
        const float x = hyperbolic_tangent<T>(scores[m][n][e] * scale);
        if (kSlopes) slopes[m][n][e] *= fmaf(-x, x, 1.f);
        scores[m][n][e] = x * cap;
      });
    } else {
      each_element<kM, kN>([&](int m, int n, int e) { scores[m][n][e] *= a.scale_log2; });
    }
  }
  with_mask<T, kTurned>(a, place, scores, [&](float& score, auto value) {
    if constexpr (sizeof(value) == 1) {
      score = value == 0 ? -kInfinity : score;  // chosen, not added: it hides infinities and NaN too
    } else {
      score = fmaf(to_float(value), factor, score);
    }
  });
}

}  // namespace fuseline
