// The loss of a linear head without its logits (Hopper): per row and tile of words the largest logit, the sum of the
// exponentials against it, and the target's logit, from the fp32 sums of x W^T that stay in registers.
//
// Floor: 8,192 rows of 768 and 50,304 words are 633 GFLOP, 672 us at the 4,096 FLOP a cycle of 132 multiprocessors at
// 1.755 GHz; their exponentials take a sixth of that at 16 a cycle, beside the products or after them.
//
// Blocks stay, and take tile after tile of 128 rows and kWide words. One thread fetches 64 columns of k at a time by bulk
// tensor copies, kStages of them ahead; in a cluster of two, whose blocks have neighbouring rows and the same words, each
// fetches half of the words' for both. Two warpgroups multiply, 64 rows each. With two sets of sums (kSets) a warpgroup
// takes the exponentials of one tile in pieces while its products of the next are under way; with one set, after them,
// and then one warpgroup runs kSkew steps ahead, so that the other's products fill the time.
//
// Blocks at work together have all rows of a group and neighbouring words: the words come from memory once a group, and x
// and they stay in the L2 meanwhile.
#pragma once

#include "chunk_product.cuh"
#include "wgmma_wide.cuh"

namespace fuseline {

constexpr int kHeadRows = 128;    // of a block's tile
constexpr int kHeadThreads = 384;  // two warpgroups that multiply, one of which one thread copies
constexpr int kHeadStep = 64;     // columns of k
constexpr int kHeadPieces = 12;   // of the work on a tile's sums; the steps of k are no fewer

struct HeadLoss {
  CUtensorMap x, w;
  const void* target;
  float2* parts;   // [tiles][rows]: the largest logit, and the sum of exponentials against it
  float* scores;   // [rows]: the target's logit
  int rows, n;     // n: words that count
  int tiles, steps;
  int row_blocks;  // a cluster's
  int group;       // of these, that share what the L2 has of W
  int items;       // row_blocks * tiles
  bool int32_targets;
};

template <int kWideTile, int kSetsOfSums, int kBlocks, int kRing, int kAhead>
struct HeadShape {
  static constexpr int kWide = kWideTile, kSets = kSetsOfSums, kCluster = kBlocks, kStages = kRing, kSkew = kAhead;
  static constexpr int kXBytes = kHeadRows * 128, kWBytes = kWide * 128, kStageBytes = kXBytes + kWBytes;
  static constexpr int kShared = kStages * kStageBytes + 1024 + 2 * kStages * 8;
  static_assert(kShared <= 227 * 1024 && kSkew < kStages);
};

// A tile: rows of the cluster from block * kCluster * kHeadRows on, words from tile * kWide on. Groups of row blocks one
// after another; in a group tile after tile.
struct HeadPlace {
  int block, tile;
};

__host__ __device__ inline HeadPlace head_place(int item, int row_blocks, int tiles, int group) {
  const int whole = group * tiles, number = item / whole, first = number * group, at = item - number * whole;
  const int here = row_blocks - first < group ? row_blocks - first : group;
  return {first + at % here, at / here};
}

// Where a thread stands in the ring.
template <int kStages>
struct HeadSlot {
  int slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// Arrives at the barrier that block `rank` of the cluster has where this one has `barrier`.
__device__ __forceinline__ void arrive_in_cluster(uint64_t* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .b32 at;\n"
      " mapa.shared::cluster.u32 at, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
#endif
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A thread's two rows of a tile whose sums are there.
template <class Shape>
struct HeadTile {
  static constexpr int kBlocks = Shape::kWide / 8;  // of 8 words
  static constexpr int kMaxPieces = 4, kSumPieces = kHeadPieces - kMaxPieces;
  static constexpr float kLog2 = 1.4426950408889634f;
  static_assert(kBlocks % kMaxPieces == 0 && kBlocks % kSumPieces == 0);

  float max[2], sum[2];
  int target[2];  // word of the tile; outside if it is none of it
  int row, tile;  // the first row; the other one is 8 on. tile < 0: none

  __device__ __forceinline__ void none() { tile = -1, row = 0, target[0] = target[1] = -1; }

  __device__ __forceinline__ void at(const HeadLoss& a, int item, int rank) {
    const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
    row = (place.block * Shape::kCluster + rank) * kHeadRows + int(threadIdx.x) / kWarp * 16 + int(threadIdx.x) % kWarp / 4;
    tile = place.tile;
  }

  __device__ __forceinline__ void begin(const HeadLoss& a, float (&sums)[kBlocks][4]) {
    const int first = tile * Shape::kWide, left = a.n - first;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = -INFINITY, sum[h] = 0.f, target[h] = -1;
      if (tile >= 0 && row + 8 * h < a.rows) {
        const int64_t t = (a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[row + 8 * h])
                                           : static_cast<const int64_t*>(a.target)[row + 8 * h]);
        if (t >= first && t < a.n && t < first + Shape::kWide) target[h] = int(t - first);
      }
    }
    if (left < Shape::kWide) {
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

  template <int p>
  __device__ __forceinline__ void rest(const HeadLoss& a, const float (&sums)[kBlocks][4]) {
    piece<p>(a, sums);
    if constexpr (p + 1 < kHeadPieces) rest<p + 1>(a, sums);
  }

  __device__ __forceinline__ void all(const HeadLoss& a, float (&sums)[kBlocks][4]) {
    begin(a, sums);
    rest<0>(a, sums);
    finish(a);
  }
};

// What a warpgroup that multiplies goes through the ring with.
template <class T, class Shape>
struct HeadProducts {
  static constexpr int kBlocks = Shape::kWide / 8;
  uint32_t base;  // of the ring, and of this warpgroup's rows
  int rows;
  uint64_t *full, *empty;
  HeadSlot<Shape::kStages> at;
  int held = -1;  // slot that products read which nobody has waited for

  __device__ __forceinline__ void release(int slot) const {
    const int lane = int(threadIdx.x) % kWarp;
    if constexpr (Shape::kCluster == 1) {
      if (lane == 0) barrier_arrive(&empty[slot]);
    } else {
      if (lane < Shape::kCluster) arrive_in_cluster(&empty[slot], lane);
    }
  }

  // One step's products begin; those of the step before have ended.
  __device__ __forceinline__ void step(float (&sums)[kBlocks][4], bool first) {
    barrier_wait(&full[at.slot], at.parity);
    const uint32_t stage = base + at.slot * Shape::kStageBytes;
    const Panels<64, kHeadRows> x{stage};
    const Panels<64, Shape::kWide> w{stage + Shape::kXBytes};
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadStep / 16; ++k) {
      wgmma_wide<T, Shape::kWide>(sums, x.rows(rows, k), w.rows(0, k), !first || k > 0);
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
  __device__ __forceinline__ void steps(const HeadLoss& a, float (&sums)[kBlocks][4], HeadTile<Shape>& before,
                                        float (&others)[kBlocks][4]) {
    step(sums, p == 0);
    if constexpr (p == 0) {
      hold(others);
      before.begin(a, others);
    }
    before.template piece<p>(a, others);
    if constexpr (p + 1 < kHeadPieces) steps<p + 1>(a, sums, before, others);
  }

  // The products of a tile, and the work on the tile before it beside them.
  __device__ __forceinline__ void tile(const HeadLoss& a, float (&sums)[kBlocks][4], HeadTile<Shape>& before,
                                       float (&others)[kBlocks][4]) {
    steps<0>(a, sums, before, others);
    before.finish(a);
#pragma unroll 1
    for (int s = kHeadPieces; s < a.steps; ++s) step(sums, false);
  }
};

template <class T, class Shape>
__global__ void __launch_bounds__(kHeadThreads, 1) head_loss_kernel(const __grid_constant__ HeadLoss a) {
#if FUSELINE_HAS_WGMMA
  extern __shared__ char raw[];
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  uint64_t* const full = reinterpret_cast<uint64_t*>(raw + (base - shared_address(raw)) + Shape::kStages * Shape::kStageBytes);
  uint64_t* const empty = full + Shape::kStages;
  const int rank = int(blockIdx.x) % Shape::kCluster, cluster = int(blockIdx.x) / Shape::kCluster;
  const int clusters = int(gridDim.x) / Shape::kCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], 8 * Shape::kCluster);  // warps that multiply
    }
    publish_barriers();
  }
  if constexpr (Shape::kCluster > 1) cluster_arrive(), cluster_wait();
  __syncthreads();
  const int warpgroup = int(threadIdx.x) / 128;
  if (warpgroup == 2) {
    give_registers<24>();
    if (threadIdx.x == 256) {
      fetch_tensor_map(&a.x), fetch_tensor_map(&a.w);
      constexpr int kPart = Shape::kWide / Shape::kCluster;
      HeadSlot<Shape::kStages> at;
      for (int item = cluster; item < a.items; item += clusters) {
        const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
        const int row = (place.block * Shape::kCluster + rank) * kHeadRows, word = place.tile * Shape::kWide + rank * kPart;
#pragma unroll 1
        for (int s = 0; s < a.steps; ++s) {
          barrier_wait(&empty[at.slot], at.parity ^ 1);
          barrier_expect(&full[at.slot], Shape::kStageBytes);
          const uint32_t stage = base + at.slot * Shape::kStageBytes;
          copy_box(stage, &a.x, &full[at.slot], s * kHeadStep, row, 0);
          const uint32_t to = stage + Shape::kXBytes + rank * kPart * 128;
          if constexpr (Shape::kCluster == 1) {
            copy_box(to, &a.w, &full[at.slot], s * kHeadStep, word, 0);
          } else {
            copy_box(to, &a.w, &full[at.slot], s * kHeadStep, word, 0, (1u << Shape::kCluster) - 1);
          }
          at.advance();
        }
      }
    }
  } else {
    take_registers<240>();
    HeadProducts<T, Shape> products{base, 64 * warpgroup, full, empty};
    HeadTile<Shape> tile;
    if constexpr (Shape::kSets == 2) {
      float even[Shape::kWide / 8][4], odd[Shape::kWide / 8][4];
#pragma unroll
      for (int i = 0; i < Shape::kWide / 8; ++i) odd[i][0] = odd[i][1] = odd[i][2] = odd[i][3] = 0.f;
      tile.none();
      int item = cluster;
#pragma unroll 1
      for (;;) {
        products.tile(a, even, tile, odd);
        tile.at(a, item, rank);
        item += clusters;
        if (item >= a.items) {
          products.end();
          hold(even);
          tile.all(a, even);
          break;
        }
        products.tile(a, odd, tile, even);
        tile.at(a, item, rank);
        item += clusters;
        if (item >= a.items) {
          products.end();
          hold(odd);
          tile.all(a, odd);
          break;
        }
      }
    } else {
      float sums[Shape::kWide / 8][4];
#pragma unroll 1
      for (int item = cluster; item < a.items; item += clusters) {
        if (Shape::kSkew > 0 && warpgroup == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll 1
        for (int s = 0; s < a.steps; ++s) {
          products.step(sums, s == 0);
          if (Shape::kSkew > 0 && warpgroup == 0 && s == Shape::kSkew - 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
        }
        products.end();
        hold(sums);
        tile.at(a, item, rank);
        tile.all(a, sums);
      }
    }
  }
  if constexpr (Shape::kCluster > 1) cluster_arrive(), cluster_wait();  // no block goes while another may reach into it
#endif
}

}  // namespace fuseline
