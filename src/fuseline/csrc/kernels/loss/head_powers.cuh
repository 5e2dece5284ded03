// The powers of a linear head's logits in the place of the logits (Hopper): exp(logit) / 2^shift, with the sum of each row's
// and tile's, and the target's logit (head_tiles.cuh). What is left to do for the gradient is a number a row.
//
// Floor: that of head_product.cuh; the exponentials are taken beside the products, as in head_loss.cuh.
#pragma once

#include "head_loss.cuh"
#include "head_product.cuh"

namespace fuseline {

struct HeadPowers : HeadTiles {
  const void* target;
  const float2* sampled;  // [rows]: the largest of some of the row's logits
  __nv_bfloat16* powers;  // [rows, words]
  float* sums;            // [tiles][rows]
  float* scores;          // [rows]: the target's logit
  int rows, words, n;     // n: words that count
  bool int32_targets;
};

// A row's shift is a power of two, so far above the largest logit of a sample. The largest of all is no less than that: of
// it, words to 2^-40 keep their powers, and those below are zeros. Where it is some 126 above the sample's, or more, the sum
// leaves what kMostSum allows.
constexpr float kHeadRoom = 86.f;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float head_shift(float sampled) { return rintf(sampled * kLog2E) + kHeadRoom; }

// exp(logit) over 2^shift.
__device__ __forceinline__ float head_power(float logit, float shift) { return power_of_two(fmaf(logit, kLog2E, -shift)); }

// A thread's two rows of a tile whose sums are there.
struct HeadPowersTile {
  using Given = HeadPowers;
  static constexpr bool kTurnLeft = false, kTurnRight = false;
  static constexpr int kBlocks = kHeadWide / 8;
  static_assert(2 * kHeadPieces == kBlocks);

  float shift[2], sum[2];
  int target[2];  // word of the tile; outside if it is none of it
  int row, tile;  // the first row; the other one is 8 on. tile < 0: none

  __device__ __forceinline__ void none() { tile = -1, row = 0x7ffffff0; }

  __device__ __forceinline__ void at(const HeadPlace& place, int rank) { row = head_row(place, rank), tile = place.tile; }

  __device__ __forceinline__ void begin(const HeadPowers& a, float (&sums)[kBlocks][4]) {
    const int first = tile * kHeadWide, left = a.n - first;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h;
      shift[h] = sum[h] = 0.f, target[h] = -1;
      if (r < a.rows) {
        shift[h] = head_shift(a.sampled[r].x);
        const int64_t t = a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[r])
                                          : static_cast<const int64_t*>(a.target)[r];
        if (t >= first && t < a.n && t < first + kHeadWide) target[h] = int(t - first);
      }
    }
    if (left < kHeadWide) {
      const int quad = int(threadIdx.x) % 4;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (8 * i + 2 * quad + j % 2 >= left) sums[i][j] = -INFINITY;
        }
      }
    }
  }

  template <int p>
  __device__ __forceinline__ void piece(const HeadPowers& a, const float (&sums)[kBlocks][4]) {
    const int quad = int(threadIdx.x) % 4;
    const bool odd = quad % 2;
    const int c = tile * kHeadWide + 8 * (2 * p + odd) + (quad & 2) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h, mine = target[h] - 16 * p - 2 * quad;  // of this lane's words 0, 1, 8 and 9
      if (mine == 0) a.scores[r] = sums[2 * p][2 * h];
      if (mine == 1) a.scores[r] = sums[2 * p][2 * h + 1];
      if (mine == 8) a.scores[r] = sums[2 * p + 1][2 * h];
      if (mine == 9) a.scores[r] = sums[2 * p + 1][2 * h + 1];
      float power[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        power[j] = head_power(sums[2 * p + j / 2][2 * h + j % 2], shift[h]);
      }
      sum[h] += (power[0] + power[1]) + (power[2] + power[3]);
      const uint32_t left = pack_pair<__nv_bfloat16>(power[0], power[1]), right = pack_pair<__nv_bfloat16>(power[2], power[3]);
      const uint2 four = beside_next(left, right, odd);
      if (r < a.rows && c < a.words) *reinterpret_cast<uint2*>(a.powers + int64_t(r) * a.words + c) = four;
    }
  }

  __device__ __forceinline__ void finish(const HeadPowers& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
      if (int(threadIdx.x) % 4 == 0 && row + 8 * h < a.rows) a.sums[int64_t(tile) * a.rows + row + 8 * h] = sum[h];
    }
  }
};

}  // namespace fuseline
