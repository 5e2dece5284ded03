// Linear layers for tens to hundreds of rows of activations, weights of 4 and 8 bits, on Hopper: y = x W^T + bias.
//
// Floor: 4096 x 12288 and 128 rows are 12.9 GFLOP, 16 us at 790 TFLOP/s, where the weights take 8 (int4) or 17 us. What
// is left to lose is in x: each block of 128 rows of W reads all of it, 100 MB together here, from the L2.
//
// A block has 128 rows of W, up to 256 rows of x and a stretch of the columns, which the blocks of a cluster share where
// there are few rows of W. The eight columns that a lane of packed weights has are not neighbours in the product, so a
// kernel of its own puts x in order first (linear_tiles_order.cu); one thread then brings it by bulk copies, chunk by
// chunk. Two warpgroups multiply, 64 rows of W each, for few rows of x two more every other chunk: a warp reads its own
// tiles of W from memory, some chunks ahead, and makes them the A of the products in registers while another warpgroup's
// products are under way; nothing of W is ever stored. Sums of blocks are added up in their order: the same bits each run.
//
// Weights of int4 are rounded to x's dtype here, as dequantizing rounds them: a second set of sums, for groups, does not
// fit beside 256 rows. int8 is exact until its fp32 sums are scaled.
#pragma once

#include "linear_call.cuh"
#include "meeting.cuh"
#include "waiting.cuh"
#include "wgmma.cuh"

namespace fuseline {

constexpr int kBlockTiles = 8;  // of 16 rows of W
constexpr int kBlockRows = kBlockTiles * kTileRows;
constexpr int kTilePitch = kBlockRows + 4;  // floats between rows of x among the sums: banks apart

// How much a block with kRows rows of x holds.
template <class Weights, int kRows>
struct TilesShape {
  static constexpr int kStageBytes = kRows * kTileColumns * 2;
  static constexpr int kStages = kRows == 32 ? 16 : kRows == 64 ? 12 : kRows == 128 ? 8 : 6;
  // Warpgroups that multiply the same rows of W, chunks in turn: few rows of x leave them waiting for each other's ends.
  static constexpr int kDepth = kRows <= 64 ? 2 : 1;
  static constexpr int kMultipliers = 256 * kDepth;
  static constexpr int kThreads = kMultipliers + 128;  // and a warpgroup that brings x and gives them its registers
  static constexpr int kRegisters = kDepth == 2 ? 112 : 240;
  static constexpr int kAhead = kRows <= 64 ? 4 : kRows == 128 ? 6 : 3;  // chunks of weights under way
  static constexpr int kShared = kStages * kStageBytes;
  static_assert(kShared >= kRows * kTilePitch * 4);
};

// Stages of x, full and empty in turn.
template <int kStages>
struct Stages {
  uint64_t full[kStages], empty[kStages];
};

// The warpgroups that multiply, without the one that brings x.
template <int kMultipliers>
__device__ __forceinline__ void meet_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kMultipliers) : "memory");
}

// Where in the ring somebody is.
template <int kStages>
struct Place {
  int slot = 0, phase = 0;

  __device__ __forceinline__ void next(int by = 1) {
    slot += by;
    if (slot >= kStages) slot -= kStages, phase ^= 1;
  }
};

// One thread brings what is in order already.
template <class Shape>
__device__ __forceinline__ void bring_x(const LinearArguments& a, char* ring, Stages<Shape::kStages>& stages, int begin,
                                        int chunks) {
  const char* from = a.workspace + (int64_t(blockIdx.y) * a.chunks + begin) * Shape::kStageBytes;
  Place<Shape::kStages> place;
  for (int chunk = 0; chunk < chunks; ++chunk, from += Shape::kStageBytes) {
    barrier_wait(&stages.empty[place.slot], place.phase ^ 1);
    barrier_expect(&stages.full[place.slot], Shape::kStageBytes);
    copy_in(ring + place.slot * Shape::kStageBytes, from, Shape::kStageBytes, &stages.full[place.slot]);
    place.next();
  }
}

// What a lane holds of a chunk of its warp's tile.
template <class Weights>
struct Chunk {
  uint4 raw[Weights::kVectors];
  uint32_t scale[2], zero[2];  // int4, by half: rows g and g + 8
};

// The chunk as the A of its four products.
template <class T, class Weights>
__device__ __forceinline__ void make_operands(uint32_t (&w)[4][4], const Chunk<Weights>& chunk) {
  if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Weights::template step<T>(w[2 * half], chunk.raw[half].x, chunk.raw[half].y);
      Weights::template step<T>(w[2 * half + 1], chunk.raw[half].z, chunk.raw[half].w);
    }
  } else {
    const uint32_t words[4] = {chunk.raw[0].x, chunk.raw[0].y, chunk.raw[0].z, chunk.raw[0].w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = chunk.zero[half];
      const uint32_t zero[2] = {kIntegers<T> + (both & 0xffu) * 0x10001u, kIntegers<T> + (both >> 8) * 0x10001u};
      const float2 scales = unpack_pair<__nv_bfloat16>(chunk.scale[half]);
      const uint32_t scale[2] = {pack_pair<T>(scales.x, scales.x), pack_pair<T>(scales.y, scales.y)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Weights::template step<T>(w[2 * half + j], words[2 * half + j], zero);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[2 * half + j][i] = times<T>(w[2 * half + j][i], scale[i % 2]);
      }
    }
  }
}

// The sums of 64 rows of W a warpgroup over the block's columns, into `planes` [row of x][row of W].
template <class T, class Weights, class Shape, int kRows>
__device__ __forceinline__ void multiply_tiles(const LinearArguments& a, uint32_t ring, float* planes,
                                               Stages<Shape::kStages>& stages, int first_tile, int begin, int chunks) {
  constexpr int kAhead = Shape::kAhead, kTileVectors = Weights::kVectors * kWarp, kDepth = Shape::kDepth;
  const int lane = threadIdx.x % kWarp, warp = int(threadIdx.x) / kWarp % 8, depth = int(threadIdx.x) / 256;
  const int group = lane / 4, quad = lane % 4;
  const int tile = min(first_tile + warp, a.tiles - 1);
  const char* const weight = a.weight + ((int64_t(tile) * a.chunks + begin) * kTileVectors + lane) * 16;
  const int64_t groups_at = int64_t(tile) * a.groups * 8 + group;
  Chunk<Weights> held[kAhead];
  const auto load = [&](Chunk<Weights>& to, int chunk) {
    if (chunk >= chunks) return;
#pragma unroll
    for (int v = 0; v < Weights::kVectors; ++v) {
      to.raw[v] = load_once(weight + int64_t(chunk) * (kTileVectors * 16) + v * (kWarp * 16));
    }
    if constexpr (Weights::kGrouped) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = min((2 * (begin + chunk) + half) >> a.group_shift, a.groups - 1);
        to.scale[half] = __ldg(a.scales + groups_at + of * 8);
        to.zero[half] = a.zeros ? __ldg(reinterpret_cast<const uint16_t*>(a.zeros) + groups_at + of * 8) : 0x0808u;
      }
    }
  };
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(held[u], depth + u * kDepth);

  float sums[kRows / 2] = {};
  Place<Shape::kStages> place;
  place.slot = depth;
  for (int chunk = depth; chunk < chunks; chunk += kAhead * kDepth) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (chunk + u * kDepth >= chunks) break;
      uint32_t w[4][4];
      make_operands<T, Weights>(w, held[u]);
      barrier_wait(&stages.full[place.slot], place.phase);
      const uint32_t stage = ring + place.slot * Shape::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma<T, kRows>(sums, w[step], wgmma_operand(stage + step * (2 * kRows * 16), kRows * 16), true);
      }
      wgmma_commit();
      load(held[u], chunk + (u + kAhead) * kDepth);
      wgmma_wait<0>();  // the other warpgroup's products go on
      if (lane == 0) barrier_arrive(&stages.empty[place.slot]);
      place.next(kDepth);
    }
  }
  meet_multipliers<Shape::kMultipliers>();  // nobody reads x any more: the sums take its place
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d > 0) meet_multipliers<Shape::kMultipliers>();
    if (d != depth) continue;
#pragma unroll
    for (int c = 0; c < kRows / 8; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& to = planes[(c * 8 + quad * 2 + i % 2) * kTilePitch + warp * kTileRows + group + i / 2 * 8];
        to = d == 0 ? sums[c * 4 + i] : to + sums[c * 4 + i];
      }
    }
  }
}

// Four features of a row of x at a time, of all the cluster's blocks.
template <class T, class Weights, int kRows, int kMultipliers>
__device__ __forceinline__ void write_tiles(const LinearArguments& a, const float* planes, int first_row, int first_feature,
                                            int rank) {
  const int count = min(a.m - first_row, kRows) * (kBlockRows / 4), thread = int(threadIdx.x);
  for (int i = rank * kMultipliers + thread; i < count; i += a.splits * kMultipliers) {
    const int row = i / (kBlockRows / 4), column = i % (kBlockRows / 4) * 4, feature = first_feature + column;
    if (feature >= a.n) continue;
    const float* const here = planes + row * kTilePitch + column;
    float4 sum = *reinterpret_cast<const float4*>(here);
    if (a.splits > 1) {
      sum = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int s = 0; s < a.splits; ++s) {
        const float4 one = load_four_in_cluster(here, s);
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
    }
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    const int64_t to = int64_t(first_row + row) * a.n + feature;
    T out[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      out[e] = T(0.f);
      if (feature + e >= a.n) continue;
      const float scale = Weights::kGrouped ? 1.f : __uint_as_float(__ldg(a.scales + feature + e));
      const float shift = a.bias ? to_float(reinterpret_cast<const T*>(a.bias)[feature + e]) : 0.f;
      float y = activated<T>(a, fmaf(sums[e], scale, shift), 0.f);
      if (a.residual) y += to_float(reinterpret_cast<const T*>(a.residual)[to + e]);
      out[e] = from_float<T>(y);
    }
    T* const y = reinterpret_cast<T*>(a.y) + to;
    if (a.y_fours) {
      *reinterpret_cast<uint2*>(y) = *reinterpret_cast<const uint2*>(out);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (feature + e < a.n) y[e] = out[e];
      }
    }
  }
}

template <class T, class Weights, int kRows>
__global__ void __launch_bounds__(TilesShape<Weights, kRows>::kThreads, 1) linear_tiles_kernel(const __grid_constant__ LinearArguments a) {
#if FUSELINE_HAS_WGMMA
  using Shape = TilesShape<Weights, kRows>;
  extern __shared__ __align__(128) char shared[];
  __shared__ Stages<Shape::kStages> stages;
  if (threadIdx.x < Shape::kStages) {
    barrier_init(&stages.full[threadIdx.x], 1);
    barrier_init(&stages.empty[threadIdx.x], 256 / kWarp);
    publish_barriers();
  }
  const int rank = int(blockIdx.x) % a.splits, place = int(blockIdx.x) / a.splits, first_row = int(blockIdx.y) * kRows;
  const int begin = rank * a.steps_a_split, chunks = min(a.steps_a_split, a.chunks - begin);
  __syncthreads();
  if (threadIdx.x >= Shape::kMultipliers) {
    give_registers<24>();
    wait_for_earlier();  // x is being put in order; all before that has ended
    let_next_start();
    if (threadIdx.x == Shape::kMultipliers) bring_x<Shape>(a, shared, stages, begin, chunks);
  } else {
    take_registers<Shape::kRegisters>();
    float* const planes = reinterpret_cast<float*>(shared);
    const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
    multiply_tiles<T, Weights, Shape, kRows>(a, ring, planes, stages, place * kBlockTiles, begin, chunks);
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      meet_multipliers<Shape::kMultipliers>();
    }
    wait_for_earlier();  // a residual, and y itself, may be of earlier launches
    write_tiles<T, Weights, kRows, Shape::kMultipliers>(a, planes, first_row, place * kBlockRows, rank);
    if (a.splits > 1) {  // nobody leaves while others of the cluster read here
      cluster_arrive();
      cluster_wait();
    }
  }
#endif
}

}  // namespace fuseline
