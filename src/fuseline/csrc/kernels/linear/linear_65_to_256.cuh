// Linear layers for 65 to 256 rows of activations, few weights of 4 and 8 bits, on Hopper: y = x W^T + bias.
//
// Floor: 4096 x 4096 and 256 rows are 8.6 GFLOP, 9.3 us of 128 multiprocessors' products; x comes to each from the L2, 0.5 MB
// in some 10 us. What stands around the products counts as much: a launch, the first bytes' way, the sums of blocks that share
// a tile.
//
// A block has 64 rows of W for each of its warpgroups, 128 rows of x and a part of the columns. One thread fetches 64 columns
// of both at a time by bulk tensor copies, many steps ahead, and x stays as it is: the copies leave packed weights swizzled so
// that a lane finds, without bank conflicts, the columns that are its own in mma.m16n8k16 in words that lanes of its quad
// would have. A warpgroup makes A of the next step in registers while its products of two steps are under way.
//
// The blocks that share a tile's columns are a cluster: each sends the others what of its sums they have to add, and adds and
// writes an equal share of the tile, always in the same order. y leaves through shared memory, 16 bytes at a time.
#pragma once

#include "linear_tiles_sums.cuh"
#include "linear_tiles_x.cuh"
#include "device/tensor_boxes.cuh"
#include "device/tensor_map.h"
#include "device/wgmma_panels.cuh"

namespace fuseline {

struct Call65To256 {
  CUtensorMap x, weight;
  LinearArguments a;
  int row_blocks;  // of x
};

template <class Weights, int kWarpgroups>
struct Shape65To256 {
  static constexpr Sizes65To256 kSizes = sizes_65_to_256(Weights::kFormat, kWarpgroups);
  static constexpr int kMultipliers = kWarpgroups * 128, kThreads = kSizes.threads;
  static constexpr int kRegisters = kWarpgroups == 3 ? 160 : 240, kOtherRegisters = 24;
  static constexpr int kBlockTiles = kSizes.block_tiles, kTileBytes = tile_bytes(Weights::kFormat);
  static constexpr int kXBytes = kRows65To256 * 128, kStageBytes = kSizes.stage_bytes, kStages = kSizes.stages;
  static constexpr int kEights = kRows65To256 / 8;  // of rows of x, four sums of a thread each
  static constexpr int kPitch = kBlockTiles * kTileRows * 2 + 16;  // bytes of a row of y in shared memory: no bank conflicts
  static_assert(kStageBytes % 1024 == 0);
};

// Where a lane reads a tile of 16 rows: of each half step a word that each lane of its quad has in the packed layout
// (fuseline_quant.h). Swizzled, 16-byte piece p of 128-byte line l stands in place p ^ l % 8.
template <class Weights>
struct PackedWords {
  uint32_t at;
  int shift;

  __device__ __forceinline__ PackedWords(int warp, int lane) {
    const int group = lane / 4, quad = lane % 4;
    if constexpr (Weights::kGrouped) {
      at = group / 2 * 128 + ((group ^ warp) % 2 * 4 + group / 2) * 16 + quad / 2 * 4;
      shift = quad % 2 * 8;
    } else {
      at = group / 2 * 128 + (group % 2 * 4 + group / 2) * 16 + quad * 4;
      shift = 0;
    }
  }

  // Columns 32 half + 8 of_lane + 2 quad and the one after, of rows `group` and `group` + 8.
  __device__ __forceinline__ uint32_t load(uint32_t tile, int half, int of_lane) const {
    if constexpr (Weights::kGrouped) {
      return load_shared_word(tile + (at ^ of_lane * 16) + half * 8) >> shift;
    } else {
      return load_shared_word(tile + (at ^ (of_lane * 16 + half * 64)) + half * 512);
    }
  }

  __device__ __forceinline__ void load(uint32_t (&words)[8], uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = load(tile, i / 4, i % 4);
  }
};

// 16 columns as the A of a product.
template <class T, class Weights>
__device__ __forceinline__ void make_operand(uint32_t (&w)[4], uint32_t low, uint32_t high, const uint32_t (&scales)[2]) {
  if constexpr (Weights::kGrouped) {
    constexpr uint32_t kZero = kIntegers<T> + 0x00080008u;
    const uint32_t words[4] = {low, low >> 4, high, high >> 4};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = times<T>(minus<T>(and_or(words[i], 0x000f000fu, kIntegers<T>), kZero), scales[i % 2]);
    }
  } else {
    Weights::template step<T>(w, low, high);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) make_ready(w[i]);
}

__device__ __forceinline__ void store_four_in_cluster(uint32_t here, int rank, const float* four) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .u32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}\n" ::"r"(here),
      "r"(rank), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
      : "memory");
#endif
}

// Two 8 x 8 matrices of 16-bit elements, turned: lane i < 16 names line i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices_turned(uint32_t line, uint32_t first, uint32_t second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(line), "r"(first), "r"(second)
               : "memory");
#endif
}

// Whole sums on their way to y: put() for each eight rows of x, then send() by all.
template <class T, class Weights, class Shape>
struct HundredsOut {
  static constexpr int kVectorsOfRow = Shape::kBlockTiles * 2;
  float scale[2], shift[2];
  uint32_t room, line;

  __device__ __forceinline__ HundredsOut(const LinearArguments& a, uint32_t shared, int tile) : room(shared) {
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    line = shared + lane % 8 * Shape::kPitch + (warp * kTileRows + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * kTileRows + lane / 4 + 8 * i;
      scale[i] = !Weights::kGrouped && row < a.n ? __uint_as_float(__ldg(a.scales + row)) : 1.f;
      shift[i] = a.bias && row < a.n ? to_float(reinterpret_cast<const T*>(a.bias)[row]) : 0.f;
    }
  }

  __device__ __forceinline__ void put(const float* sums, int eight) const {
    const uint32_t upper = pack_pair<T>(fmaf(sums[0], scale[0], shift[0]), fmaf(sums[1], scale[0], shift[0]));
    const uint32_t lower = pack_pair<T>(fmaf(sums[2], scale[1], shift[1]), fmaf(sums[3], scale[1], shift[1]));
    store_matrices_turned(line + eight * 8 * Shape::kPitch, upper, lower);
  }

  // The first `rows` rows, from (first_row, first_feature) on.
  __device__ __forceinline__ void send(const LinearArguments& a, int rows, int first_row, int first_feature) const {
    meet_multipliers<Shape::kMultipliers>();
    rows = min(rows, a.m - first_row);
    T* const y = reinterpret_cast<T*>(a.y) + int64_t(first_row) * a.n + first_feature;
    if (a.n % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0) {
      for (int v = int(threadIdx.x); v < rows * kVectorsOfRow; v += Shape::kMultipliers) {
        const int row = v / kVectorsOfRow, vector = v % kVectorsOfRow;
        if (first_feature + vector * 8 >= a.n) continue;
        *reinterpret_cast<uint4*>(y + int64_t(row) * a.n + vector * 8) = load_shared(room + row * Shape::kPitch + vector * 16);
      }
    } else {
      constexpr int kWords = kVectorsOfRow * 4;
      for (int v = int(threadIdx.x); v < rows * kWords; v += Shape::kMultipliers) {
        const int row = v / kWords, feature = v % kWords * 2;
        const uint32_t pair = load_shared_word(room + row * Shape::kPitch + feature * 2);
        const uint16_t two[2] = {uint16_t(pair), uint16_t(pair >> 16)};
        uint16_t* const to = reinterpret_cast<uint16_t*>(y + int64_t(row) * a.n + feature);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (first_feature + feature + i < a.n) to[i] = two[i];
        }
      }
    }
  }
};

// The blocks of a cluster share a tile; this one's sums are of part `split` of its columns.
template <class T, class Weights, class Shape, int kSplits>
__device__ __forceinline__ void add_shares(const LinearArguments& a, const float (&sums)[Shape::kEights * 4], uint32_t ring,
                                           int split, int first_row, int first_feature,
                                           const HundredsOut<T, Weights, Shape>& out) {
  constexpr int kEights = Shape::kEights, kMost = (kEights + kSplits - 1) / kSplits;
  constexpr uint32_t kLine = Shape::kMultipliers * 16, kRoom = (kMost * 8 * Shape::kPitch + 127) / 128 * 128;  // behind y
  static_assert(kRoom + (kSplits - 1) * kMost * kLine <= Shape::kStages * Shape::kStageBytes);
  const uint32_t room = ring + kRoom + threadIdx.x * 16;
  float mine[kMost][4];
  cluster_wait();  // nobody fetches or multiplies any more
#pragma unroll
  for (int p = 0; p < kSplits; ++p) {
    const int first = kEights * p / kSplits, end = kEights * (p + 1) / kSplits;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (first + j >= end) continue;
      const float* const four = &sums[4 * (first + j)];
      if (p == split) {
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[j][e] = four[e];
      } else {
        store_four_in_cluster(room + ((split - (split > p)) * kMost + j) * kLine, p, four);
      }
    }
  }
  cluster_arrive();
  cluster_wait();
  const int first = kEights * split / kSplits, count = kEights * (split + 1) / kSplits - first;
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    if (j >= count) break;
#pragma unroll
    for (int o = 0; o + 1 < kSplits; ++o) {
      const uint4 raw = load_shared(room + (o * kMost + j) * kLine);
      mine[j][0] += __uint_as_float(raw.x), mine[j][1] += __uint_as_float(raw.y);
      mine[j][2] += __uint_as_float(raw.z), mine[j][3] += __uint_as_float(raw.w);
    }
    out.put(mine[j], j);
  }
  out.send(a, count * 8, first_row + first * 8, first_feature);
}

template <class T, class Weights, int kWarpgroups, class Shape = Shape65To256<Weights, kWarpgroups>>
__global__ void __launch_bounds__(Shape::kThreads, 1) linear_65_to_256_kernel(const __grid_constant__ Call65To256 c) {
#if FUSELINE_HAS_WGMMA
  constexpr int kRows = kRows65To256, kStages = Shape::kStages;
  extern __shared__ char raw[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const LinearArguments& a = c.a;
  const uint32_t ring = (shared_address(raw) + 1023) / 1024 * 1024;
  const int split = int(blockIdx.x) % a.splits, tile_of_block = int(blockIdx.x) / a.splits;
  const int first_row = tile_of_block % c.row_blocks * kRows, first_tile = tile_of_block / c.row_blocks * Shape::kBlockTiles;
  const int first = a.chunks * split / a.splits, steps = a.chunks * (split + 1) / a.splits - first;

  const bool fetches = threadIdx.x == Shape::kMultipliers;
  const auto fetch_weights = [&](int step, int slot) {
    barrier_expect(&full[slot], Shape::kStageBytes);
    copy_box(ring + slot * Shape::kStageBytes + Shape::kXBytes, &c.weight, &full[slot], 0,
             (first + step) * (Shape::kTileBytes / 128), first_tile);
  };
  if (fetches) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], Shape::kMultipliers / kWarp);
    }
    publish_barriers();
    show_to_copies();
    fetch_tensor_map(&c.weight), fetch_tensor_map(&c.x);
    if (a.overlap) {
      for (int step = 0; step < min(kStages, steps); ++step) fetch_weights(step, step);
    }
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kMultipliers) {
    give_registers<Shape::kOtherRegisters>();
    wait_for_earlier();
    let_next_start();
    if (fetches) {
      Place<kStages> at;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        if (step >= kStages) barrier_wait(&empty[at.slot], at.phase ^ 1);
        if (step >= kStages || !a.overlap) fetch_weights(step, at.slot);
        copy_box(ring + at.slot * Shape::kStageBytes, &c.x, &full[at.slot], (first + step) * kTileColumns, first_row, 0);
        at.next();
      }
    }
    if (a.splits > 1) {  // as the others do
      __syncwarp();
      for (int i = 0; i < 2; ++i) {
        cluster_arrive();
        cluster_wait();
      }
    }
  } else {
    take_registers<Shape::kRegisters>();
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp, tile = first_tile + warp;
    const PackedWords<Weights> packed(warp, lane);
    const uint32_t weights = ring + Shape::kXBytes + warp * Shape::kTileBytes;
    // Scales of the groups from `group` on, and those of the next step as two of T.
    uint32_t later[3] = {}, scales[2] = {};
    int group = -1;
    const auto scales_of = [&](int of) {
      return __ldg(a.scales + (int64_t(min(tile, a.tiles - 1)) * a.groups + min(of, a.groups - 1)) * 8 + lane / 4);
    };
    const auto find_scales = [&](int step) {
      if constexpr (Weights::kGrouped) {
        const int of = (2 * (first + step)) >> a.group_shift;
        if (of == group) return;
        group = of;
        const float2 both = unpack_pair<__nv_bfloat16>(later[0]);
        scales[0] = pack_pair<T>(both.x, both.x), scales[1] = pack_pair<T>(both.y, both.y);
        later[0] = later[1], later[1] = later[2], later[2] = scales_of(of + 3);
      }
    };
    if constexpr (Weights::kGrouped) {
      if (!a.overlap) wait_for_earlier();
#pragma unroll
      for (int i = 0; i < 3; ++i) later[i] = scales_of(((2 * first) >> a.group_shift) + i);
    }
    barrier_wait(&full[0], 0);
    wait_for_earlier();
    const HundredsOut<T, Weights, Shape> out(a, ring, tile);
    float sums[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.f;

    // A of one step is made while the products of the step before are under way, and those are waited for only when the
    // next ones have begun: waiting for all of them takes a fifth more time a step.
    Place<kStages> at, ahead, behind;  // of products to begin, of operands to make, of what is read until its products end
    uint32_t even[4][4], odd[4][4];
    const auto make = [&](uint32_t(&w)[4][4], int step) {
      uint32_t words[8];
      find_scales(step);
      barrier_wait(&full[ahead.slot], ahead.phase);
      packed.load(words, weights + ahead.slot * Shape::kStageBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) make_operand<T, Weights>(w[i], words[2 * i], words[2 * i + 1], scales);
      ahead.next();
    };
    const auto multiply = [&](const uint32_t(&w)[4][4]) {
      const Panels<kTileColumns, kRows> x{ring + at.slot * Shape::kStageBytes};
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma<T, kRows>(sums, w[i], x.rows(0, i), true);
      wgmma_commit();
      at.next();
    };
    const auto release = [&] {
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(&empty[behind.slot]);
      behind.next();
    };
    make(even, 0);
    multiply(even);
    if (steps > 1) make(odd, 1);
    int step = 0;
#pragma unroll 1
    for (; step + 2 < steps; step += 2) {
      multiply(odd);
      release();
      make(even, step + 2);
      multiply(even);
      release();
      if (step + 3 < steps) make(odd, step + 3);
    }
    if (step + 1 < steps) multiply(odd);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // read behind this, not before
    const int first_feature = first_tile * kTileRows;
    if (a.splits == 1) {
      meet_multipliers<Shape::kMultipliers>();  // nobody reads weights or x any more
#pragma unroll
      for (int i = 0; i < Shape::kEights; ++i) out.put(&sums[4 * i], i);
      out.send(a, kRows, first_row, first_feature);
    } else {
      cluster_arrive();
      switch (a.splits) {
        case 2: return add_shares<T, Weights, Shape, 2>(a, sums, ring, split, first_row, first_feature, out);
        case 3: return add_shares<T, Weights, Shape, 3>(a, sums, ring, split, first_row, first_feature, out);
        case 4: return add_shares<T, Weights, Shape, 4>(a, sums, ring, split, first_row, first_feature, out);
        case 6: return add_shares<T, Weights, Shape, 6>(a, sums, ring, split, first_row, first_feature, out);
        default: return add_shares<T, Weights, Shape, 8>(a, sums, ring, split, first_row, first_feature, out);
      }
    }
  }
#endif
}

}  // namespace fuseline
