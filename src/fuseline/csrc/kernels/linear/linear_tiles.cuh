// Linear layers for tens to hundreds of rows of activations, weights of 4 and 8 bits, on Hopper: y = x W^T + bias.
//
// Floor: 4096 x 12288 and 128 rows are 12.9 GFLOP, 16 us at 790 TFLOP/s, where the weights take 8 (int4) or 17 us. What
// is left to lose is in the L2, which gives a multiprocessor 47 bytes a nanosecond at most: each block of rows of W reads
// all of x, 50 MB together here.
//
// A block has 256 rows of W (128 beside 256 rows of x) and up to 256 rows of x at a time. The products of all such tiles,
// 128 columns a step, are one run of steps, cut evenly among as many blocks as there are multiprocessors, wherever the cuts
// fall in a tile: no wave of blocks is left half empty. Who has a tile's first columns adds what the blocks after it have
// left in the workspace, in their order: the same bits each run. Of int8 beside up to 32 rows, where memory is all that
// counts, two blocks of 128 rows share a multiprocessor: one reads on while the other begins, waits or adds.
//
// Of few tiles each is cut often, and the one block that adds would take longer than all the products: 8 blocks' sums are
// 1 MB beside 128 rows of x, 22 us. There the blocks of a cluster share a tile, leave their sums in shared memory, and each
// adds and writes its part of them.
//
// Beside 256 rows each step of a block is 64 KB of x. Of a head's many tiles two blocks of a cluster do the same steps of
// neighbouring tiles, and each brings half of x to both.
//
// The eight columns that a lane of packed weights has are not neighbours in the product: a warpgroup of each block puts x in
// order on its way to the others, four words of a thread's 16 bytes apart. Beside more than 128 rows that would take the time
// of all products, and a kernel of its own does so first (linear_tiles_order.cu); one thread then brings x by bulk copies.
//
// Warpgroups multiply, 64 rows of W each, for 128 rows of x twice as many one after the other: a warp reads its own tiles of W
// from memory, some steps ahead, and makes them the A of the products in registers while other products are under way.
// What is ahead stands in registers, beside up to 32 rows of x in shared memory, where each lane copies what it will read
// itself and needs nobody for it: 32 KB a multiprocessor under way were not enough for int4, and behind 128 KB x comes late.
//
// Weights of int4 in groups of 128 columns and more stay integers beside up to 32 rows of x, and the sums of a step are
// scaled; elsewhere they are rounded to x's dtype here, as dequantizing rounds them: a second set of sums does not fit.
// int8 is exact until its fp32 sums are scaled.
#pragma once

#include "linear_tiles_sums.cuh"
#include "linear_tiles_x.cuh"
#include "device/wgmma.cuh"

namespace fuseline {

// What a lane holds of a step of a tile.
template <class Weights, bool kAnyGroups>
struct HeldStep {
  static constexpr int kScales = !Weights::kGrouped ? 0 : kAnyGroups ? 2 * kStepChunks : 1;  // of rows g and g + 8
  uint4 raw[kStepChunks * Weights::kVectors];
  uint32_t scale[kScales + 1], zero[kAnyGroups ? 2 * kStepChunks : 1];
};

// A chunk of a step as the A of its four products; `scales` multiplies them unless sums are.
template <class T, class Weights, bool kAnyGroups, bool kScalesSums>
__device__ __forceinline__ void make_operands(uint32_t (&w)[4][4], const HeldStep<Weights, kAnyGroups>& held, int chunk) {
  if constexpr (Weights::kFormat == FUSELINE_WEIGHT_INT8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 raw = held.raw[2 * chunk + half];
      Weights::template step<T>(w[2 * half], raw.x, raw.y);
      Weights::template step<T>(w[2 * half + 1], raw.z, raw.w);
    }
  } else {
    const uint4 raw = held.raw[chunk];
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t zero[2] = {kIntegers<T> + 0x00080008u, kIntegers<T> + 0x00080008u};
      if constexpr (kAnyGroups) {
        const uint32_t both = held.zero[2 * chunk + half];
        zero[0] = kIntegers<T> + (both & 0xffu) * 0x10001u;
        zero[1] = kIntegers<T> + (both >> 8) * 0x10001u;
      }
      const float2 scales = unpack_pair<__nv_bfloat16>(held.scale[kAnyGroups ? 2 * chunk + half : 0]);
      const uint32_t scale[2] = {pack_pair<T>(scales.x, scales.x), pack_pair<T>(scales.y, scales.y)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Weights::template step<T>(w[2 * half + j], words[2 * half + j], zero);
        if constexpr (!kScalesSums) {
#pragma unroll
          for (int i = 0; i < 4; ++i) w[2 * half + j][i] = times<T>(w[2 * half + j][i], scale[i % 2]);
        }
      }
    }
  }
}

// The operand so many bytes on: one addition.
__device__ __forceinline__ uint64_t further(uint64_t operand, int bytes) {
  return (operand >> 32 << 32) | uint32_t(uint32_t(operand) + bytes / 16);
}

template <class T, class Weights, int kRows, bool kAnyGroups, bool kInCluster>
__device__ __forceinline__ void multiply_run(const LinearArguments& a, char* shared,
                                             Stages<TilesShape<Weights, kRows, kAnyGroups>::kStages>& stages, int row_blocks) {
  using Shape = TilesShape<Weights, kRows, kAnyGroups>;
  constexpr int kAhead = Shape::kAhead, kRing = Shape::kRing, kTileVectors = Weights::kVectors * kWarp;
  constexpr bool kScalesSums = Shape::kScalesSums;
  constexpr int kWarpTiles = Shape::kWarpTiles, kSums = kRows / 2;
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % kWarp, group = lane / 4;
  const Run run = own_run<kInCluster>(a);
  if (!a.overlap) wait_for_earlier();

  const auto block_of = [&](int tile) { return tile / row_blocks; };  // of W

  // The next step to be asked for.
  int load_tile = run.first / a.steps, load_step = run.first % a.steps, to_load = run.end - run.first;
  uint32_t from[kWarpTiles], scales_from[kWarpTiles];  // 16-byte vectors of weights, words of scales
  const auto point = [&] {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
      const int tile = min(Shape::tile_of(block_of(load_tile), t), a.tiles - 1);
      from[t] = (uint32_t(tile) * a.chunks + load_step * kStepChunks) * kTileVectors + lane;
      scales_from[t] = uint32_t(tile) * a.groups * 8 + group;
    }
  };
  HeldStep<Weights, kAnyGroups> held[kAhead][kWarpTiles];
  // Of this lane, in the ring; scales stand behind the weights of each slot.
  const uint32_t weights = ring + Shape::kXBytes + threadIdx.x / kWarp * (kRing * Shape::kSlotBytes) + lane * 16;
  const uint32_t scales_at = weights + Shape::kTileStepBytes - lane * 12;
  int slot = 0;
  const auto load = [&](HeldStep<Weights, kAnyGroups>& to, int t) {
    if (to_load == 0) return;
    // Past the last columns any weights will do: x is zero there.
    const uint32_t second = load_step * kStepChunks + 1 < a.chunks ? kTileVectors : 0;
#pragma unroll
    for (int chunk = 0; chunk < kStepChunks; ++chunk) {
#pragma unroll
      for (int v = 0; v < Weights::kVectors; ++v) {
        const char* const raw = a.weight + int64_t(from[t] + chunk * second + v * kWarp) * 16;
        if constexpr (kRing > 0) {
          copy_async(weights + slot * Shape::kSlotBytes + (chunk * Weights::kVectors + v) * (kWarp * 16), raw);
        } else {
          to.raw[chunk * Weights::kVectors + v] = load_once(raw);
        }
      }
    }
    if constexpr (Weights::kGrouped && !kAnyGroups) {
      const uint32_t* const scale = a.scales + (scales_from[t] + (load_step >> (a.group_shift - 2)) * 8);
      if constexpr (kRing > 0) {
        copy_word_async(scales_at + slot * Shape::kSlotBytes, scale);
      } else {
        to.scale[0] = __ldg(scale);
      }
    } else if constexpr (Weights::kGrouped) {
#pragma unroll
      for (int half = 0; half < 2 * kStepChunks; ++half) {
        const int of = min((2 * kStepChunks * load_step + half) >> a.group_shift, a.groups - 1);
        to.scale[half] = __ldg(a.scales + (scales_from[t] + of * 8));
        to.zero[half] = a.zeros ? __ldg(reinterpret_cast<const uint16_t*>(a.zeros) + (scales_from[t] + of * 8)) : 0x0808u;
      }
    }
    from[t] += kStepChunks * kTileVectors;
    if (t + 1 < kWarpTiles) return;
    --to_load;
    if (++load_step == a.steps) {
      load_step = 0, ++load_tile;
      if (to_load > 0) point();
    }
  };
  // Of the ring: what a step had in its slot is read when the copy for a later one begins.
  const auto load_slot = [&] {
    load(held[0][0], 0);
    commit_copies();
    if (++slot == kRing) slot = 0;
  };
  const auto read_slot = [&](HeldStep<Weights, kAnyGroups>& to) {
    wait_for_copies<kRing - 1>();
#pragma unroll
    for (int v = 0; v < kStepChunks * Weights::kVectors; ++v) {
      to.raw[v] = load_shared(weights + slot * Shape::kSlotBytes + v * (kWarp * 16));
    }
    if constexpr (Weights::kGrouped) to.scale[0] = load_shared_word(scales_at + slot * Shape::kSlotBytes);
  };
  if (to_load > 0) point();
  if constexpr (kRing > 0) {
#pragma unroll 1
    for (int u = 0; u < kRing; ++u) load_slot();
  } else {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t) load(held[u][t], t);
    }
  }
  if constexpr (kRows <= 64) {  // what HBM does until x has come is not waited for later
    wait_for_earlier();
    const int steps = min(min(a.prefetched, to_load), a.steps - load_step);
    const int chunks = min(steps * kStepChunks, a.chunks - load_step * kStepChunks);
    if (lane == 0 && steps > 0) prefetch_to_l2(a.weight + int64_t(from[0]) * 16, chunks * kTileVectors * 16);
  }

  Place<Shape::kStages> place;
  float sums[kWarpTiles][kSums];
  const auto multiply = [&](HeldStep<Weights, kAnyGroups>(&step)[kWarpTiles]) {
    if constexpr (kRing > 0) read_slot(step[0]);
    float part[kScalesSums ? kSums : 1];
    float2 scales = make_float2(0.f, 0.f);
    if constexpr (kScalesSums) {  // out of the way of the scale to be loaded: else that one is moved, and so waited for
      scales = unpack_pair<__nv_bfloat16>(step[0].scale[0]);
      make_ready(scales.x), make_ready(scales.y);
    }
    const uint64_t stage = wgmma_operand(ring + place.slot * Shape::kStageBytes, kRows * 16);
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
      for (int chunk = 0; chunk < kStepChunks; ++chunk) {
        uint32_t w[4][4];
        make_operands<T, Weights, kAnyGroups, kScalesSums>(w, step[t], chunk);
        if (t == 0 && chunk == 0) barrier_wait(&stages.full[place.slot], place.phase);
        if (chunk == kStepChunks - 1) {
          if constexpr (kRing > 0) {
            load_slot();
          } else {
            load(step[t], t);
          }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint64_t x = further(stage, chunk * (kRows * 128) + i * (2 * kRows * 16));
          if constexpr (kScalesSums) {
            wgmma<T, kRows>(part, w[i], x, chunk + i > 0);
          } else {
            wgmma<T, kRows>(sums[t], w[i], x, true);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();  // the registers of the chunk before are free
      }
    }
    wgmma_wait<0>();  // other warpgroups' products go on
    if (lane == 0) barrier_arrive(&stages.empty[place.slot]);
    place.next();
    if constexpr (kScalesSums) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[0][i] = fmaf(i % 4 < 2 ? scales.x : scales.y, part[i], sums[0][i]);
    }
  };

  int tile = run.first / a.steps, begin = run.first % a.steps;
  for (int at = run.first; at < run.end; ++tile, begin = 0) {
    const int end = min(a.steps, begin + run.end - at);
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[t][i] = 0.f;
    }
    int left = end - begin;
    at += left;
    for (; left > 0; left -= kAhead) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (u < left) multiply(held[u]);
      }
    }
    if constexpr (kInCluster) {
      wait_for_earlier();  // who reads y before
      add_in_cluster<T, Weights, Shape, kRows>(a, sums, reinterpret_cast<float4*>(shared), row_blocks);
      return;  // one tile is all
    } else {
      for (left += kAhead; left % kAhead != 0; --left) {  // the next tile begins with held[0]
#pragma unroll
        for (int t = 0; t < kWarpTiles; ++t) {
          const HeldStep<Weights, kAnyGroups> first = held[0][t];
#pragma unroll
          for (int u = 0; u + 1 < kAhead; ++u) held[u][t] = held[u + 1][t];
          held[kAhead - 1][t] = first;
        }
      }
      wait_for_earlier();  // the flags, and who reads y or the workspace before
      if (gather<Shape>(a, sums, begin, end)) {
#pragma unroll
        for (int t = 0; t < kWarpTiles; ++t) {
          const AroundSums<T, Weights> around(a, Shape::tile_of(block_of(tile), t));
#pragma unroll
          for (int i = 0; i < kSums / 4; ++i) around.write(a, &sums[t][4 * i], tile % row_blocks * kRows + 8 * i);
        }
      }
    }
  }
}

template <class T, class Weights, int kRows, bool kAnyGroups, bool kInCluster,
          class Shape = TilesShape<Weights, kRows, kAnyGroups>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    linear_tiles_kernel(const __grid_constant__ LinearArguments a) {
#if FUSELINE_HAS_WGMMA
  extern __shared__ __align__(128) char shared[];
  __shared__ Stages<Shape::kStages> stages;
  if (threadIdx.x < Shape::kStages) {
    barrier_init(&stages.full[threadIdx.x], a.ordered ? 1 : 4);
    barrier_init(&stages.empty[threadIdx.x], Shape::kMultipliers / kWarp);
    publish_barriers();
  }
  const int row_blocks = (a.m + kRows - 1) / kRows;  // of the same rows of W: one after the other
  __syncthreads();
  if (threadIdx.x >= Shape::kMultipliers) {
    give_registers<Shape::kOtherRegisters>();
    wait_for_earlier();
    let_next_start();
    if (Shape::kUnordered > 0 && !a.ordered) {
      if constexpr (Shape::kUnordered > 0) order_x<Shape, kRows, kInCluster>(a, shared, stages);
    } else if (threadIdx.x == Shape::kMultipliers) {
      bring_x<Shape, kInCluster>(a, shared, stages, row_blocks);
    }
    if constexpr (kInCluster) {  // as the others do
      __syncwarp();
      for (int i = 0; i < 2; ++i) {
        cluster_arrive();
        cluster_wait();
      }
    }
  } else {
    take_registers<Shape::kRegisters>();
    multiply_run<T, Weights, kRows, kAnyGroups, kInCluster>(a, shared, stages, row_blocks);
  }
#endif
}

}  // namespace fuseline
