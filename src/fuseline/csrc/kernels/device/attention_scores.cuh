// Scores between the two products: where a lane's stand, scale and soft cap, the keys' bounds.
//
// Sums of a product lie as attention_tiles.cuh says, with query rows as rows and keys as columns, or the other way round
// (kTurned). Tiles of keys stand in shared memory in an order that gives each lane runs of neighbouring keys, so that a
// run of the mask is one load, and a run of random words one or two blocks of four.
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

// Exact to rounding for fp32; for 16 bits to 2e-7 of 1: a power that is infinite, or too large for the quotient, leaves 1,
// and NaN stays NaN, which a bound on the power would not let through.
template <class T>
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return tanhf(x);
  } else {
    return 1.f - __fdividef(2.f, 1.f + power_of_two(2.f * kLog2E * x));
  }
}

// The order of keys that become the columns of a product with kN sums a row and lane: lane `quad` has kRun of each
// 4 * kRun neighbouring keys, key kRun * quad + 2 i + e as column 8 i + 2 quad + e. As `slot` of copy_tile: of powers of
// two it is the sum of the slots.
template <int kN>
struct KeyColumns {
  static constexpr int kRun = kN % 4 == 0 ? 8 : kN % 2 == 0 ? 4 : 2;
  static __device__ __forceinline__ constexpr int slot(int key) {
    const int within = key % (4 * kRun);
    return key - within + within % kRun / 2 * 8 + within / kRun * 2 + within % 2;
  }
  // The key of a lane's columns 8 n and + 1, relative to the first of its run of the first keys.
  static __device__ __forceinline__ constexpr int key(int n) { return n / (kRun / 2) * 4 * kRun + n % (kRun / 2) * 2; }
};

// The order of keys that become the 16 * kM rows of a product: a lane has 2 * kM neighbours, key 2 * kM * group + 2 m + half
// as row 16 m + 8 half + group.
template <int kM>
struct KeyRows {
  static constexpr int kRun = 2 * kM;
  static __device__ __forceinline__ constexpr int slot(int key) {
    const int within = key % (16 * kM), i = within % kRun;
    return key - within + i / 2 * 16 + i % 2 * 8 + within / kRun;
  }
};

// The warp's place in the scores of a head.
struct Place {
  const Sequence& sequence;
  int head, row, key;           // of this warp's first element
  const unsigned char* mask;    // of that element in a tile in shared memory
};

// Element (m, n, e) of the lane is score (row, key).
template <bool kTurned, int kM, int kN>
struct Element {
  int row, key;
  __device__ __forceinline__ Element(const Place& place, int m, int n, int e) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    if constexpr (kTurned) {
      row = place.row + 8 * n + 2 * quad + e % 2, key = place.key + KeyRows<kM>::kRun * group + 2 * m + e / 2;
    } else {
      using Order = KeyColumns<kN>;
      row = place.row + 16 * m + 8 * (e / 2) + group, key = place.key + Order::kRun * quad + Order::key(n) + e % 2;
    }
  }
};

// How far the lane's columns 8 n + e of a product are from its first: keys, or if turned rows.
template <bool kTurned, int kN>
__device__ __forceinline__ constexpr int column_of(int n, int e) {
  return (kTurned ? 8 * n : KeyColumns<kN>::key(n)) + e;
}

// -inf for keys that bounds hide.
template <bool kTurned, int kM, int kN>
__device__ __forceinline__ void hide_bounds(const Attention& a, const Place& place, float (&scores)[kM][kN][4]) {
  const Sequence& sequence = place.sequence;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // What this row of scores sees of its columns, from the lane's first column on.
      const Element<kTurned, kM, kN> at(place, m, 0, 2 * half);
      const bool there = kTurned ? at.key < sequence.keys : at.row < sequence.rows;
      const int from = kTurned ? sequence.rows_from(a, at.key) - at.row : sequence.keys_from(a, at.row) - at.key;
      const int to = kTurned ? sequence.rows_to(a, at.key) - at.row : sequence.keys_to(a, at.row) - at.key;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = column_of<kTurned, kN>(n, e);
          if (!there || column < from || column >= to) scores[m][n][2 * half + e] = -kInfinity;
        }
    }
}

template <int kM, int kN, class Change>
__device__ __forceinline__ void each_element(Change&& change) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) change(m, n, e);
}

}  // namespace fuseline
