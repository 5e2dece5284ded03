// A product of a linear head written as it is (Hopper): logits, or the gradients of hidden and weight (head_tiles.cuh).
//
// Floor: that of head_loss.cuh each; 8,192 x 50,304 logits take 270 us to write, beside the products.
#pragma once

#include "device/head_tiles.cuh"

namespace fuseline {

struct HeadProduct : HeadTiles {
  void* out;
  const float* factors;  // of rows, for the gradient of hidden; or null
  int m, n;
};

// Of two blocks of 8 columns that lanes beside each other have pairs of: four columns of the left one for even lanes, of the
// right one for odd ones.
__device__ __forceinline__ uint2 beside_next(uint32_t left, uint32_t right, bool odd) {
  const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? left : right, 1);
  return odd ? make_uint2(got, right) : make_uint2(left, got);
}

// A thread's part of a tile.
template <class T, bool kLeft, bool kRight>
struct HeadProductTile {
  using Given = HeadProduct;
  static constexpr bool kTurnLeft = kLeft, kTurnRight = kRight;
  static constexpr bool kFactors = !kLeft && kRight;
  static_assert(2 * kHeadPieces == kHeadWide / 8);
  int row, column;
  float factor[2];

  __device__ __forceinline__ void none() { row = 0x7ffffff0, column = 0; }
  __device__ __forceinline__ void at(const HeadPlace& place, int rank) {
    row = head_row(place, rank), column = place.tile * kHeadWide;
  }
  __device__ __forceinline__ void begin(const HeadProduct& a, float (&)[24][4]) {
    if constexpr (kFactors) {
#pragma unroll
      for (int h = 0; h < 2; ++h) factor[h] = a.factors && row + 8 * h < a.m ? a.factors[row + 8 * h] : 1.f;
    }
  }
  __device__ __forceinline__ void finish(const HeadProduct&) const {}

  // Lanes beside each other exchange halves of two blocks of 8 columns, and write 8 bytes each, four lanes 32.
  template <int p>
  __device__ __forceinline__ void piece(const HeadProduct& a, const float (&sums)[24][4]) const {
    const int quad = int(threadIdx.x) % 4;
    const bool odd = quad % 2;
    const int c = column + 8 * (2 * p + odd) + (quad & 2) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float by = kFactors ? factor[h] : 1.f;
      const uint32_t left = pack_pair<T>(sums[2 * p][2 * h] * by, sums[2 * p][2 * h + 1] * by);
      const uint32_t right = pack_pair<T>(sums[2 * p + 1][2 * h] * by, sums[2 * p + 1][2 * h + 1] * by);
      const uint2 four = beside_next(left, right, odd);
      const int r = row + 8 * h;
      if (r < a.m && c < a.n) *reinterpret_cast<uint2*>(static_cast<T*>(a.out) + int64_t(r) * a.n + c) = four;
    }
  }
};

}  // namespace fuseline
