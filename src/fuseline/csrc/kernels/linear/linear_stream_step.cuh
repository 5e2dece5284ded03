// A step of a stream (linear_stream.cuh): how much it is, what a lane holds of it, and its products.
#pragma once

#include "linear_call.cuh"

namespace fuseline {

// `kAnyGroups`: int4 with zero points or groups of fewer than 128 columns.
template <class Weights, int kColumnBlocks, bool kAnyGroups>
struct StreamShape {
  static constexpr StreamSizes kSizes = stream_sizes(Weights::kFormat, kColumnBlocks, kAnyGroups);
  static constexpr bool kInt4 = Weights::kFormat == FUSELINE_WEIGHT_INT4;
  static constexpr int kTiles = kSizes.tiles, kChunks = kSizes.chunks, kVectors = kSizes.vectors, kAhead = kSizes.ahead;
  static constexpr int kWarps = kSizes.warps, kThreads = kWarps * kWarp;
  static constexpr bool kStagesScales = kSizes.stages_scales;
#if __CUDA_ARCH__ >= 900
  static constexpr int kBlocks = kSizes.blocks;
#else
  static constexpr int kBlocks = 1;  // launches do not overlap
#endif
};

// What a lane has of a step of one tile.
template <class Shape>
struct Step {
  uint4 raw[Shape::kVectors];
  uint32_t scale, zero;  // kAnyGroups
};

// sums += the products of one step of all tiles. `x_at`: this lane's columns of its row in each block of columns.
// `scales_at`: of its rows and the step's group, in shared memory, unless the step has them itself (kAnyGroups).
template <class T, class Weights, int kColumnBlocks, bool kAnyGroups>
__device__ __forceinline__ void multiply_step(
    const LinearArguments& a, const Step<StreamShape<Weights, kColumnBlocks, kAnyGroups>> (
                                  &step)[StreamShape<Weights, kColumnBlocks, kAnyGroups>::kTiles],
    const uint32_t (&x_at)[kColumnBlocks], int x_offset, uint32_t scales_at, int next_scales,
    float (&sums)[StreamShape<Weights, kColumnBlocks, kAnyGroups>::kTiles][kColumnBlocks][4]) {
  using Shape = StreamShape<Weights, kColumnBlocks, kAnyGroups>;
  constexpr int kTiles = Shape::kTiles, kHalves = 2 * Shape::kChunks;
  float part[kTiles][kColumnBlocks][4];
  // One block of columns would be one chain of products, each waiting for the one before: every other one goes apart.
  constexpr bool kApart = Shape::kInt4 && kColumnBlocks == 1;
  [[maybe_unused]] float apart[kTiles][4];
  const auto scaled = [&](int t, uint32_t word) {
    const float2 scale = unpack_pair<__nv_bfloat16>(word);
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][c][i] = fmaf(i < 2 ? scale.x : scale.y, part[t][c][i], sums[t][c][i]);
    }
  };
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    uint32_t w[kTiles][2][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if constexpr (Weights::kFormat == FUSELINE_WEIGHT_16) {
        const uint4 above = step[t].raw[2 * half], below = step[t].raw[2 * half + 1];
        w[t][0][0] = above.x, w[t][0][1] = below.x, w[t][0][2] = above.y, w[t][0][3] = below.y;
        w[t][1][0] = above.z, w[t][1][1] = below.z, w[t][1][2] = above.w, w[t][1][3] = below.w;
      } else if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) {
        const uint4 raw = step[t].raw[half];
        Weights::template step<T>(w[t][0], raw.x, raw.y);
        Weights::template step<T>(w[t][1], raw.z, raw.w);
      } else {
        const uint4 raw = step[t].raw[half / 2];
        uint32_t zero[2] = {kIntegers<T> + 0x00080008u, kIntegers<T> + 0x00080008u};
        if constexpr (kAnyGroups) {  // of half q of the step lane 4 g + q has rows g and g + 8
          const uint32_t both = __shfl_sync(~0u, step[t].zero, (threadIdx.x & 28) + half);
          zero[0] = kIntegers<T> + (both & 0xffu) * 0x10001u;
          zero[1] = kIntegers<T> + (both >> 8) * 0x10001u;
        }
        Weights::template step<T>(w[t][0], half % 2 == 0 ? raw.x : raw.z, zero);
        Weights::template step<T>(w[t][1], half % 2 == 0 ? raw.y : raw.w, zero);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      const uint4 b = load_shared(x_at[c] + x_offset + half * 64);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float(&to)[4] = Shape::kInt4 ? part[t][c] : sums[t][c];
        float(&other)[4] = kApart ? apart[t] : to;
        const bool begins = Shape::kInt4 && (kAnyGroups || half == 0), ends = kAnyGroups || half == kHalves - 1;
        if (begins) to[0] = to[1] = to[2] = to[3] = 0.f;
        if (begins && kApart) other[0] = other[1] = other[2] = other[3] = 0.f;
        mma_16816<T>(to, w[t][0], b.x, b.y);
        mma_16816<T>(other, w[t][1], b.z, b.w);
        if (ends && kApart) {
#pragma unroll
          for (int i = 0; i < 4; ++i) to[i] += other[i];
        }
      }
    }
    if constexpr (kAnyGroups) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) scaled(t, __shfl_sync(~0u, step[t].scale, (threadIdx.x & 28) + half));
    }
  }
  if constexpr (Shape::kStagesScales) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) scaled(t, load_shared_word(scales_at + t * next_scales));
  }
}

}  // namespace fuseline
