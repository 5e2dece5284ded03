// Trial: the gradients' products of a linear head on Hopper, out[m, n] = A[m, k] B[k, n], B turned, A turned or not.
#pragma once

#include "head_loss.cuh"

namespace fuseline {

struct HeadProduct {
  CUtensorMap a, b;
  void* out;
  int m, n, tiles, steps, row_blocks, group, items;
};

#if FUSELINE_HAS_WGMMA
#define FUSELINE_TURNED(type) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %98, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {" FUSELINE_SUMS_192 "}, %96, %97" \
      ", add, 1, 1, %99, %100;\n}\n" \
      : FUSELINE_TILES_192 \
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTurnA)), "n"(int(kTurnB)))
#endif

template <class T, bool kTurnA, bool kTurnB>
__device__ __forceinline__ void wgmma_turned(float (&d)[24][4], uint64_t a, uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  if constexpr (std::is_same_v<T, __half>) FUSELINE_TURNED("f16");
  if constexpr (!std::is_same_v<T, __half>) FUSELINE_TURNED("bf16");
#endif
}

using ProductShape = HeadShape<192, 2, 2, 5, 0>;

template <class T>
struct ProductTile {
  int row, column;
  bool there;
  __device__ __forceinline__ void at(const HeadProduct& a, int item, int rank) {
    const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
    row = (place.block * 2 + rank) * kHeadRows + int(threadIdx.x) / kWarp * 16 + int(threadIdx.x) % kWarp / 4;
    column = place.tile * 192;
    there = true;
  }
  template <int p>
  __device__ __forceinline__ void piece(const HeadProduct& a, const float (&sums)[24][4]) const {
    // Lanes beside each other exchange halves of two tiles of 8 columns: 8 bytes each, a quad 32.
    const int quad = int(threadIdx.x) % 4;
    const bool odd = quad % 2;
    const int c = column + 8 * (2 * p + odd) + (quad & 2) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t left = pack_pair<T>(sums[2 * p][2 * h], sums[2 * p][2 * h + 1]);
      const uint32_t right = pack_pair<T>(sums[2 * p + 1][2 * h], sums[2 * p + 1][2 * h + 1]);
      const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? left : right, 1);
      const int r = row + 8 * h;
      if (there && r < a.m && c < a.n) {
        *reinterpret_cast<uint2*>(static_cast<T*>(a.out) + int64_t(r) * a.n + c) = odd ? make_uint2(got, right) : make_uint2(left, got);
      }
    }
  }
  template <int p>
  __device__ __forceinline__ void rest(const HeadProduct& a, const float (&sums)[24][4]) const {
    piece<p>(a, sums);
    if constexpr (p + 1 < kHeadPieces) rest<p + 1>(a, sums);
  }
};

template <class T, bool kTurnA, bool kTurnB>
struct ProductRun {
  using Shape = ProductShape;
  uint32_t base;
  int warpgroup;
  uint64_t *full, *empty;
  HeadSlot<Shape::kStages> at;
  int held = -1;

  __device__ __forceinline__ void release(int slot) const {
    const int lane = int(threadIdx.x) % kWarp;
    if (lane < 2) arrive_in_cluster(&empty[slot], lane);
  }
  __device__ __forceinline__ void step(float (&sums)[24][4], bool first) {
    barrier_wait(&full[at.slot], at.parity);
    const uint32_t stage = base + at.slot * Shape::kStageBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint64_t a, b;
      if constexpr (kTurnB) {
        b = Panels<192, 64>{stage + Shape::kXBytes}.columns(0, k);
      } else {
        b = Panels<64, 192>{stage + Shape::kXBytes}.rows(0, k);
      }
      if constexpr (kTurnA) {
        a = Panels<128, 64>{stage}.columns(warpgroup, k);
      } else {
        a = Panels<64, kHeadRows>{stage}.rows(64 * warpgroup, k);
      }
      wgmma_turned<T, kTurnA, kTurnB>(sums, a, b, !first || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (held >= 0) release(held);
    held = at.slot;
    at.advance();
  }
  __device__ __forceinline__ void end() {
    wgmma_wait<0>();
    if (held >= 0) release(held);
    held = -1;
  }
  template <int p>
  __device__ __forceinline__ void steps(const HeadProduct& a, float (&sums)[24][4], const ProductTile<T>& before,
                                        float (&others)[24][4]) {
    step(sums, p == 0);
    if constexpr (p == 0) hold(others);
    before.template piece<p>(a, others);
    if constexpr (p + 1 < kHeadPieces) steps<p + 1>(a, sums, before, others);
  }
  __device__ __forceinline__ void tile(const HeadProduct& a, float (&sums)[24][4], const ProductTile<T>& before,
                                       float (&others)[24][4]) {
    steps<0>(a, sums, before, others);
#pragma unroll 1
    for (int s = kHeadPieces; s < a.steps; ++s) step(sums, false);
  }
};

template <class T, bool kTurnA, bool kTurnB>
__global__ void __launch_bounds__(kHeadThreads, 1) head_product_kernel(const __grid_constant__ HeadProduct a) {
#if FUSELINE_HAS_WGMMA
  using Shape = ProductShape;
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  uint64_t* const full = reinterpret_cast<uint64_t*>(raw + (base - shared_address(raw)) + Shape::kStages * Shape::kStageBytes);
  uint64_t* const empty = full + Shape::kStages;
  const int rank = int(blockIdx.x) % 2, cluster = int(blockIdx.x) / 2, clusters = int(gridDim.x) / 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], 16);
    }
    publish_barriers();
  }
  cluster_arrive(), cluster_wait();
  __syncthreads();
  const int warpgroup = int(threadIdx.x) / 128;
  if (warpgroup == 2) {
    give_registers<24>();
    if (threadIdx.x == 256) {
      HeadSlot<Shape::kStages> at;
      for (int item = cluster; item < a.items; item += clusters) {
        const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
        const int row = (place.block * 2 + rank) * kHeadRows, column = place.tile * 192;
#pragma unroll 1
        for (int s = 0; s < a.steps; ++s) {
          barrier_wait(&empty[at.slot], at.parity ^ 1);
          barrier_expect(&full[at.slot], Shape::kStageBytes);
          const uint32_t stage = base + at.slot * Shape::kStageBytes;
          if constexpr (kTurnA) {
            copy_box(stage, &a.a, &full[at.slot], row, s * 64, 0);
            copy_box(stage + 8192, &a.a, &full[at.slot], row + 64, s * 64, 0);
          } else {
            copy_box(stage, &a.a, &full[at.slot], s * 64, row, 0);
          }
          const uint32_t to = stage + Shape::kXBytes;
          if constexpr (kTurnB) {
#pragma unroll
            for (int i = 0; i < 3; ++i) {
              copy_box(to + rank * 4096 + i * 8192, &a.b, &full[at.slot], column + 64 * i, s * 64 + rank * 32, 0, 3u);
            }
          } else {
            copy_box(to + rank * 96 * 128, &a.b, &full[at.slot], s * 64, column + rank * 96, 0, 3u);
          }
          at.advance();
        }
      }
    }
  } else {
    take_registers<240>();
    ProductRun<T, kTurnA, kTurnB> products{base, warpgroup, full, empty};
    ProductTile<T> tile{0, 0, false};
    float even[24][4], odd[24][4];
#pragma unroll
    for (int i = 0; i < 24; ++i) odd[i][0] = odd[i][1] = odd[i][2] = odd[i][3] = 0.f;
    int item = cluster;
#pragma unroll 1
    for (;;) {
      products.tile(a, even, tile, odd);
      tile.at(a, item, rank);
      item += clusters;
      if (item >= a.items) {
        products.end();
        hold(even);
        tile.template rest<0>(a, even);
        break;
      }
      products.tile(a, odd, tile, even);
      tile.at(a, item, rank);
      item += clusters;
      if (item >= a.items) {
        products.end();
        hold(odd);
        tile.template rest<0>(a, odd);
        break;
      }
    }
  }
  cluster_arrive(), cluster_wait();
#endif
}

}  // namespace fuseline
