// Tiles of the general attention kernels for products of warpgroups (wgmma_panels.cuh): how rows come to them, and the products
// of a warpgroup's 64 rows. Sums lie with the lanes as attention_tiles.cuh says, with kM = 1.
#pragma once

#include "attention_scores.cuh"
#include "attention_tiles.cuh"
#include "wgmma_panels.cuh"

namespace fuseline {

// The number of this thread's warp and of its lane, asked for anew, so that what follows from them holds no registers between
// products.
struct Lane {
  int warp, lane;
  __device__ __forceinline__ Lane() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp = int(thread / 32), lane = int(thread % 32);
  }
};

// copy_tile of attention_tiles.cuh.
template <class T, int kThreads, class Order, int kD, int kRows>
__device__ __forceinline__ void copy_panels(const Panels<kD, kRows>& to, const T* from, int64_t stride, int rows, int head_dim) {
  using Tile = Panels<kD, kRows>;
  constexpr int kStep = kThreads / Tile::kChunks;
  static_assert(kThreads % Tile::kChunks == 0 && kRows % kStep == 0 && Tile::kPitch == 128);
  unsigned thread;  // asked for anew, so that what follows from it holds no registers between copies
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread %= kThreads;
  const int first = int(thread / Tile::kChunks), chunk = int(thread % Tile::kChunks);
  rows = chunk * 8 < head_dim ? rows : 0;
  from += first * stride + chunk * 8;
  const uint32_t at = to.chunk(Order::slot(first), chunk);
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    const int slot = Order::slot(row);  // added to that of `first`, in bits that it has not
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((at ^ slot % 8 * 16) + slot * Tile::kPitch), "l"(from),
                 "r"(first + row < rows ? 16 : 0)
                 : "memory");
    from += kStep * stride;
  }
}

// What copies and stores of this thread have left is there for the products of all, once the block has met.
__device__ __forceinline__ void show_to_products() {
#if FUSELINE_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts d[64, kColumns] = left[row .. + 64] * right[column .. + kColumns]^T.
template <class T, int kN, int kD, int kLeft, int kRight>
__device__ __forceinline__ void start_rows(float (&d)[1][kN][4], const Panels<kD, kLeft>& left, int row,
                                           const Panels<kD, kRight>& right, int column) {
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    wgmma_shared<T, 8 * kN, false>(d[0], left.rows(row, k), right.rows(column, k), k > 0);
  }
}

// Sums of a product, rounded, as the left side of another.
template <class T, int kN>
__device__ __forceinline__ void pack_left(uint32_t (&left)[kN / 2][4], const float (&p)[1][kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      left[n / 2][n % 2 * 2 + half] = pack_pair<T>(p[0][n][2 * half], p[0][n][2 * half + 1]);
    }
  }
}

// Starts d[64, kD] += left[64, kRows] * right[kRows, kD].
template <class T, int kD, int kRows>
__device__ __forceinline__ void start_columns(float (&d)[1][kD / 8][4], const uint32_t (&left)[kRows / 16][4],
                                              const Panels<kD, kRows>& right) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) wgmma_held<T, kD>(d[0], left[k], right.columns(0, k), true);
}

}  // namespace fuseline
