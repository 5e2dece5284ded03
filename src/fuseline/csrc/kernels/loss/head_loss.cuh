// The loss of a linear head without its logits (Hopper): per row and tile of words the largest logit, the sum of the
// exponentials against it, and the target's logit, from the fp32 sums of x W^T that stay in registers (head_tiles.cuh).
//
// Floor: 8,192 rows of 768 and 50,304 words are 633 GFLOP, 672 us at the 4,096 FLOP a cycle of 132 multiprocessors at
// 1.755 GHz; their exponentials take a sixth of that at 16 a cycle, beside the products.
#pragma once

#include "device/head_tiles.cuh"

namespace fuseline {

struct HeadLoss : HeadTiles {
  const void* target;  // null: no scores are taken
  float2* parts;   // [tiles][rows]: the largest logit, and the sum of exponentials against it
  float* scores;   // [rows]: the target's logit
  int rows, n;     // n: words that count
  bool int32_targets;
};

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A thread's two rows of a tile whose sums are there.
struct HeadLossTile {
  using Given = HeadLoss;
  static constexpr bool kTurnLeft = false, kTurnRight = false;
  static constexpr int kBlocks = kHeadWide / 8;  // of 8 words
  static constexpr int kMaxPieces = 4, kSumPieces = kHeadPieces - kMaxPieces;
  static constexpr float kLog2 = 1.4426950408889634f;
  static_assert(kBlocks % kMaxPieces == 0 && kBlocks % kSumPieces == 0);

  float max[2], sum[2];
  int target[2];  // word of the tile; outside if it is none of it
  int row, tile;  // the first row; the other one is 8 on. tile < 0: none

  __device__ __forceinline__ void none() { tile = -1, row = 0, target[0] = target[1] = -1; }

  __device__ __forceinline__ void at(const HeadPlace& place, int rank) { row = head_row(place, rank), tile = place.tile; }

  __device__ __forceinline__ void begin(const HeadLoss& a, float (&sums)[kBlocks][4]) {
    const int first = tile * kHeadWide, left = a.n - first;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = -INFINITY, sum[h] = 0.f, target[h] = -1;
      if (a.target && tile >= 0 && row + 8 * h < a.rows) {
        const int64_t t = (a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[row + 8 * h])
                                           : static_cast<const int64_t*>(a.target)[row + 8 * h]);
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

  // Piece number p of the work: first the maxima, then the target, then the exponentials.
  template <int p>
  __device__ __forceinline__ void piece(const HeadLoss& a, const float (&sums)[kBlocks][4]) {
    if constexpr (p < kMaxPieces) {
      constexpr int kEach = kBlocks / kMaxPieces;
#pragma unroll
      for (int i = p * kEach; i < p * kEach + kEach; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) max[h] = fmaxf(max[h], fmaxf(sums[i][2 * h], sums[i][2 * h + 1]));
      }
      if (p == kMaxPieces - 1) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], 1));
          max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], 2));
        }
      }
      return;
    }
    if constexpr (p == kMaxPieces) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int mine = target[h] - int(threadIdx.x) % 4 * 2;  // of this lane's words 8 i and 8 i + 1
        if (target[h] >= 0 && (mine & 7) < 2) {
          float score = 0.f;
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            if (mine == 8 * i) score = sums[i][2 * h];
            if (mine == 8 * i + 1) score = sums[i][2 * h + 1];
          }
          a.scores[row + 8 * h] = score;
        }
      }
    }
    constexpr int kEach = kBlocks / kSumPieces;
    const float shift[2] = {max[0] * kLog2, max[1] * kLog2};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float part[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = (p - kMaxPieces) * kEach + j;
        part[0] += power_of_two(fmaf(sums[i][2 * h], kLog2, -shift[h]));
        part[1] += power_of_two(fmaf(sums[i][2 * h + 1], kLog2, -shift[h]));
      }
      sum[h] += part[0] + part[1];
    }
  }

  __device__ __forceinline__ void finish(const HeadLoss& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
      if (tile >= 0 && int(threadIdx.x) % 4 == 0 && row + 8 * h < a.rows) {
        a.parts[int64_t(tile) * a.rows + row + 8 * h] = make_float2(max[h], sum[h]);
      }
    }
  }
};

}  // namespace fuseline
