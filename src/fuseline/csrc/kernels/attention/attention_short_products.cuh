// Attention over short sequences: the products of a warp's 16 rows, with tiles of shared memory that chunks change places in.
#pragma once

#include "attention_short.cuh"

namespace fuseline::short_attention {

// Steps of a product that are taken at a time; one where registers are short.
template <int kS, int kD>
constexpr int kSteps = kS == 128 && kD < 128 ? 1 : 2;

// The blocks of 16 columns of a product that are not hidden from the warp's rows, as bits.
template <int kS>
__device__ __forceinline__ uint32_t blocks_within(int from, int to) {
  from = min(max(from, 0), kS), to = min(max(to, 0), kS);
  return ((1u << (to + 15) / 16) - 1) & ~((1u << from / 16) - 1);
}

// Which those are for each warp, in shared memory: to be known again where they are wanted, and no register held between.
// Read where a kernel skips.
template <int kS, bool kSkips>
struct Blocks {
  static constexpr int kBytes = kS == kLongest ? kS / 16 * 8 : 0;
  uint32_t at;  // a multiple of 8

  __device__ __forceinline__ void begin(const ShortAttention& a, const Place& place) const {
    if (kSkips && place.lane == 0) {
      store_pair(at + place.row / 2, blocks_within<kS>(place.row + a.first, min(place.row + 16 + a.last, a.seqlen_k)),
                 blocks_within<kS>(place.row - a.last, min(place.row + 16 - a.first, a.seqlen_q)));
    }
  }
  // Of keys that the warp's rows see.
  __device__ __forceinline__ uint32_t keys(const Place& place) const {
    return kSkips ? load_word(at + place.row / 2) : 0;
  }
  // Of rows that see the keys with the warp's rows' numbers.
  __device__ __forceinline__ uint32_t rows(const Place& place) const {
    return kSkips ? load_word(at + place.row / 2 + 4) : 0;
  }
};

// sums[16, kN] = left[row .. + 16, kD] * right[kN, kD]^T; zeros outside of `blocks` of columns, if some are skipped.
template <class T, int kD, int kN, bool kSkips>
__device__ __forceinline__ void multiply_rows(float (&sums)[kN / 8][4], const Tile<kD>& left, const Tile<kD>& right,
                                              uint32_t blocks, const Place& place) {
  const uint32_t left_at = left.chunk(place.row + place.lane % 16, place.lane / 16);
  const uint32_t right_at = right.chunk(place.lane % 8 + place.lane / 16 * 8, place.lane / 8 % 2);
  clear(sums);
#pragma unroll (kSteps<kN, kD>)
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t a[4];
    load_matrices(a, left.chunks_on(left_at, 2 * k));
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      if (kSkips && !(blocks & 1u << n)) continue;
      uint32_t b[4];
      load_matrices(b, right.rows_on(right.chunks_on(right_at, 2 * k), 16 * n));
      mma_16816<T>(sums[2 * n], a, b[0], b[1]);
      mma_16816<T>(sums[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// sums[16, kD] += a[16, 16] * right[16 * k .. + 16, kD].
template <class T, int kD>
__device__ __forceinline__ void multiply_block(float (&sums)[kD / 8][4], const uint32_t (&a)[4], const Tile<kD>& right,
                                               int k, const Place& place) {
  const uint32_t right_at = right.rows_on(right.chunk(place.lane % 16, place.lane / 16), 16 * k);
#pragma unroll
  for (int n = 0; n < kD / 16; ++n) {
    uint32_t b[4];
    load_matrices_transposed(b, right.chunks_on(right_at, 2 * n));
    mma_16816<T>(sums[2 * n], a, b[0], b[1]);
    mma_16816<T>(sums[2 * n + 1], a, b[2], b[3]);
  }
}

// sums[16, kD] = held[16, kS] * right[kS, kD], without what stands outside of `blocks` if some are skipped.
template <class T, int kS, int kD, bool kSkips>
__device__ __forceinline__ void multiply_held(float (&sums)[kD / 8][4], const uint32_t (&held)[kS / 16][4],
                                              const Tile<kD>& right, uint32_t blocks, const Place& place) {
  clear(sums);
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) {
    if (!kSkips || blocks & 1u << k) multiply_block<T, kD>(sums, held[k], right, k, place);
  }
}

}  // namespace fuseline::short_attention
