// Linear layers for tens to hundreds of rows of activations, weights of 4 and 8 bits, on Hopper: y = x W^T + bias.
//
// Floor: 4096 x 12288 and 128 rows are 12.9 GFLOP, 16 us at 790 TFLOP/s, where the weights take 8 (int4) or 17 us. What
// is left to lose is in the L2, which gives a multiprocessor 47 bytes a nanosecond at most: each block of rows of W reads
// all of x, 50 MB together here.
//
// A block has 256 rows of W (128 beside 256 rows of x) and up to 256 rows of x at a time. The products of all such tiles,
// 128 columns a step, are one run of steps, cut evenly among as many blocks as there are multiprocessors, wherever the cuts
// fall in a tile: no wave of blocks is left half empty. Who has a tile's first columns adds what the blocks after it have
// left in the workspace, in their order: the same bits each run.
//
// Of few tiles each is cut often, and the one block that adds would take longer than all the products: 8 blocks' sums are
// 1 MB beside 128 rows of x, 22 us. There the blocks of a cluster share a tile, leave their sums in shared memory, and each
// adds and writes its part of them.
//
// The eight columns that a lane of packed weights has are not neighbours in the product: a warpgroup of each block puts x in
// order on its way to the others, four words of a thread's 16 bytes apart. Beside more than 128 rows that would take the time
// of all products, and a kernel of its own does so first (linear_tiles_order.cu); one thread then brings x by bulk copies.
//
// Warpgroups multiply, 64 rows of W each, for 128 rows of x twice as many one after the other: a warp reads its own tiles of W
// from memory, some steps ahead, and makes them the A of the products in registers while other products are under way;
// nothing of W is stored.
//
// Weights of int4 in groups of 128 columns and more stay integers beside up to 32 rows of x, and the sums of a step are
// scaled; elsewhere they are rounded to x's dtype here, as dequantizing rounds them: a second set of sums does not fit.
// int8 is exact until its fp32 sums are scaled.
#pragma once

#include "linear_tiles_order.cuh"
#include "meeting.cuh"
#include "waiting.cuh"
#include "wgmma.cuh"

namespace fuseline {

constexpr int kStepChunks = 2;  // of 64 columns

// How much a block with kRows rows of x holds. `kAnyGroups`: int4 with zero points or groups of fewer than 128 columns.
template <class Weights, int kRows, bool kAnyGroups>
struct TilesShape {
  static constexpr int kGroups = kRows <= 64 ? 4 : 2;      // warpgroups that multiply
  static constexpr int kWarpTiles = kRows == 128 ? 2 : 1;  // of 16 rows of W, one after the other
  static constexpr int kBlockTiles = kGroups * 4 * kWarpTiles;
  static constexpr int kMultipliers = kGroups * 128;
  static constexpr int kThreads = kMultipliers + 128;  // and a warpgroup that brings x and gives them its registers
  static constexpr int kRegisters = kGroups == 4 ? 112 : kRows == 128 ? 232 : 240;  // all together no more than at the start
  static constexpr int kOtherRegisters = kGroups == 4 ? 32 : kRows == 128 ? 40 : 24;
  static constexpr int kStageBytes = kRows * kStepChunks * kTileColumns * 2;
  static constexpr int kStages = kRows == 32 ? 12 : kRows == 64 ? 8 : kRows == 128 ? 4 : 3;
  static constexpr int kUnordered = kRows == 32 ? 6 : kRows == 64 ? 4 : kRows == 128 ? 3 : 0;  // steps of x on their way here
  static constexpr int kShared = (kStages + kUnordered) * kStageBytes;
  static constexpr int kTileStepBytes = kStepChunks * Weights::kVectors * kWarp * 16;  // of weights, for 16 rows of W
  static constexpr int kSumBytes = kBlockTiles * kTileRows * kRows * 4;
  static_assert(kSumBytes <= kShared);
  static constexpr bool kScalesSums = Weights::kGrouped && !kAnyGroups && kRows == 32;
  // Steps of weights under way: 1 KB (int4) or 2 each for a warp's tile.
  static constexpr int kAhead = kRows == 128 && (kAnyGroups || !Weights::kGrouped) ? 1 : 2;

  // The t-th tile of this warp in the block at place `block` of those of W: of two the second is of the block's second half.
  __device__ static __forceinline__ int tile_of(int block, int t) {
    return block * kBlockTiles + t * (kMultipliers / kWarp) + int(threadIdx.x) / kWarp;
  }
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

  __device__ __forceinline__ void next() {
    if (++slot == kStages) slot = 0, phase ^= 1;
  }
};

// Blocks begin in the order of their index. The first has the last steps, so that whoever waits does so for one that began
// before it, whatever else the device has to do.
__device__ __forceinline__ int place_of_block() { return int(gridDim.x) - 1 - int(blockIdx.x); }

// The steps of the block at place `block`, of all tiles' steps.
struct Run {
  int first, end;

  __device__ __forceinline__ Run(const LinearArguments& a, int block)
      : first(block * a.base + min(block, a.extra)), end(first + a.base + (block < a.extra)) {}
};

// Of this block: where clusters share tiles, its part of one tile's.
template <bool kInCluster>
__device__ __forceinline__ Run own_run(const LinearArguments& a) {
  Run run(a, place_of_block());
  if constexpr (kInCluster) {
    const int tile = int(blockIdx.x) / a.splits, rank = int(blockIdx.x) - tile * a.splits;
    run.first = tile * a.steps + a.steps * rank / a.splits;
    run.end = tile * a.steps + a.steps * (rank + 1) / a.splits;
  }
  return run;
}

// A warpgroup brings x as it stands and puts it in order (linear_tiles_order.cuh): each thread what it fetched itself, some
// steps before, eight columns of every eighth row.
template <class Shape, int kRows, bool kInCluster>
__device__ __forceinline__ void order_x(const LinearArguments& a, char* shared, Stages<Shape::kStages>& stages) {
  constexpr int kVectors = kRows / 8;  // of 16 bytes, of a thread and step
  const Run run = own_run<kInCluster>(a);
  const int thread = int(threadIdx.x) - Shape::kMultipliers, half = thread / kWarp, row = thread % kWarp / 4, quad = thread % 4;
  const uint32_t ring = shared_address(shared), unordered = ring + Shape::kStages * Shape::kStageBytes + thread * 16;
  const uint32_t to = ring + half / 2 * (kRows * 128) + (half % 2 * 4 * kRows + row) * 16 + quad * 4;
  const char* const x = a.x + row * a.x_stride + (half * 32 + quad * 8) * 2;
  Place<Shape::kUnordered> fetched, taken;
  int step = run.first % a.steps;
  const auto fetch = [&](int at) {
    if (at < run.end) {
      const bool inside = step * (kStepChunks * kTileColumns) + half * 32 + quad * 8 < a.k;
      const char* from = x + step * (kStepChunks * kTileColumns * 2);
#pragma unroll
      for (int v = 0; v < kVectors; ++v, from += 8 * a.x_stride) {  // of rows past the last nobody reads the sums
        const uint32_t room = unordered + fetched.slot * Shape::kStageBytes + v * (4 * kWarp * 16);
        if (row + 8 * v < a.m) copy_async(room, inside ? from : a.x, inside ? 16 : 0);
      }
      fetched.next();
      if (++step == a.steps) step = 0;
    }
    commit_copies();
  };
#pragma unroll
  for (int ahead = 0; ahead + 1 < Shape::kUnordered; ++ahead) fetch(run.first + ahead);
  Place<Shape::kStages> place;
  for (int at = run.first; at < run.end; ++at) {
    fetch(at + Shape::kUnordered - 1);
    wait_for_copies<Shape::kUnordered - 1>();
    barrier_wait(&stages.empty[place.slot], place.phase ^ 1);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 raw = load_shared(unordered + taken.slot * Shape::kStageBytes + v * (4 * kWarp * 16));
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_shared_word(to + place.slot * Shape::kStageBytes + v * 128 + i * (kRows * 16), words[i]);
      }
    }
    show_to_copies();  // and to products
    __syncwarp();
    if (thread % kWarp == 0) barrier_arrive(&stages.full[place.slot]);
    taken.next(), place.next();
  }
}

// One thread brings what is in order already.
template <class Shape, bool kInCluster>
__device__ __forceinline__ void bring_x(const LinearArguments& a, char* ring, Stages<Shape::kStages>& stages, int row_blocks) {
  const Run run = own_run<kInCluster>(a);
  Place<Shape::kStages> place;
  int tile = run.first / a.steps, step = run.first % a.steps;
  for (int at = run.first; at < run.end; ++at) {
    const char* const from = a.workspace + (int64_t(tile % row_blocks) * a.steps + step) * Shape::kStageBytes;
    barrier_wait(&stages.empty[place.slot], place.phase ^ 1);
    barrier_expect(&stages.full[place.slot], Shape::kStageBytes);
    copy_in(ring + place.slot * Shape::kStageBytes, from, Shape::kStageBytes, &stages.full[place.slot]);
    place.next();
    if (++step == a.steps) step = 0, ++tile;
  }
}

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

// The sums of a tile of other blocks, that begin where this one ends, are added to this block's, or this block's left for
// who has the tile's beginning. Answers whether the sums are whole.
template <class Shape, int kTiles, int kSums>
__device__ __forceinline__ bool gather(const LinearArguments& a, float (&sums)[kTiles][kSums], int begin, int end) {
  constexpr int kPlane = kTiles * kSums / 4 * Shape::kMultipliers;  // float4 of a block
  const int block = place_of_block();
  float4* const planes = reinterpret_cast<float4*>(a.partials) + threadIdx.x;
  if (begin > 0) {
    float4* const to = planes + int64_t(block) * kPlane;
#pragma unroll
    for (int i = 0; i < kTiles * kSums / 4; ++i) {
      const float* const four = &sums[i / (kSums / 4)][i % (kSums / 4) * 4];
      __stcg(to + i * Shape::kMultipliers, make_float4(four[0], four[1], four[2], four[3]));
    }
    __threadfence();
    meet_multipliers<Shape::kMultipliers>();
    if (threadIdx.x == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(a.flags + block), "l"(a.token) : "memory");
    }
    return false;
  }
  for (int other = block + 1; end < a.steps; ++other) {
    const Run run(a, other);
    if (threadIdx.x == 0) {
      uint64_t* const flag = a.flags + other;
      uint64_t there = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(there) : "l"(flag) : "memory");
      } while (there != a.token);
      *flag = 0;  // a graph may launch this again, with the same token
    }
    meet_multipliers<Shape::kMultipliers>();
    const float4* const from = planes + int64_t(other) * kPlane;
#pragma unroll
    for (int i = 0; i < kTiles * kSums / 4; ++i) {
      float* const four = &sums[i / (kSums / 4)][i % (kSums / 4) * 4];
      const float4 more = __ldcg(from + i * Shape::kMultipliers);
      four[0] += more.x, four[1] += more.y, four[2] += more.z, four[3] += more.w;
    }
    end += run.end - run.first;
  }
  return true;
}

// What stands around the sums of a lane's rows of W, g and g + 8 of a tile.
template <class T, class Weights>
struct AroundSums {
  float scale[2], shift[2];
  int first;  // row of W

  __device__ __forceinline__ AroundSums(const LinearArguments& a, int tile)
      : first(tile * kTileRows + int(threadIdx.x) % kWarp / 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = first + 8 * i < a.n;
      scale[i] = !Weights::kGrouped && there ? __uint_as_float(__ldg(a.scales + first + 8 * i)) : 1.f;
      shift[i] = a.bias && there ? to_float(reinterpret_cast<const T*>(a.bias)[first + 8 * i]) : 0.f;
    }
  }

  // Whole sums of eight rows of x from `first_row` on to y: lanes of neighbouring rows of W trade, so that each has two
  // neighbours of one row of x.
  __device__ __forceinline__ void write(const LinearArguments& a, const float* sums, int first_row) const {
    const int lane = threadIdx.x % kWarp, odd = lane / 4 & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float one = fmaf(sums[2 * i], scale[i], shift[i]), two = fmaf(sums[2 * i + 1], scale[i], shift[i]);
      const float other = __shfl_xor_sync(~0u, odd ? one : two, 4);
      const float low = odd ? other : one, high = odd ? two : other;
      const int row = first_row + lane % 4 * 2 + odd, feature = first - odd + 8 * i;
      if (row >= a.m || feature >= a.n) continue;
      T* const y = reinterpret_cast<T*>(a.y) + int64_t(row) * a.n + feature;
      if (a.y_pairs) {
        *reinterpret_cast<uint32_t*>(y) = pack_pair<T>(low, high);
      } else {
        y[0] = from_float<T>(low);
        if (feature + 1 < a.n) y[1] = from_float<T>(high);
      }
    }
  }
};

// Where the blocks of a cluster share a tile: each has its sums stand where x was, [four of them][thread], and adds and
// writes those of every so many-th eight rows of x.
template <class T, class Weights, class Shape, int kRows, int kTiles, int kSums>
__device__ __forceinline__ void add_in_cluster(const LinearArguments& a, const float (&sums)[kTiles][kSums], float4* ring,
                                               int row_blocks) {
  float4* const plane = ring + threadIdx.x;
  meet_multipliers<Shape::kMultipliers>();  // nobody reads x any more
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float* const four = &sums[t][4 * i];
      plane[(t * (kSums / 4) + i) * Shape::kMultipliers] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
  cluster_arrive();
  cluster_wait();
  const int tile = int(blockIdx.x) / a.splits, rank = int(blockIdx.x) - tile * a.splits;
  const int first_row = tile % row_blocks * kRows;
#pragma unroll 1
  for (int t = 0; t < kTiles; ++t) {
    const AroundSums<T, Weights> around(a, Shape::tile_of(tile / row_blocks, t));
#pragma unroll 1
    for (int i = rank; i < kSums / 4; i += a.splits) {
      float4 parts[kMostSplits];
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {  // each begins with its own: nobody is asked by all at once
        if (s >= a.splits) break;
        const int from = rank + s < a.splits ? rank + s : rank + s - a.splits;
        parts[s] = load_four_in_cluster(&plane[(t * (kSums / 4) + i) * Shape::kMultipliers].x, from);
      }
      float four[4] = {};
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {
        if (s >= a.splits) break;
        four[0] += parts[s].x, four[1] += parts[s].y, four[2] += parts[s].z, four[3] += parts[s].w;
      }
      around.write(a, four, first_row + i * 8);
    }
  }
  cluster_arrive();  // nobody leaves while others read here
  cluster_wait();
}

// The operand so many bytes on: one addition.
__device__ __forceinline__ uint64_t further(uint64_t operand, int bytes) {
  return (operand >> 32 << 32) | uint32_t(uint32_t(operand) + bytes / 16);
}

template <class T, class Weights, int kRows, bool kAnyGroups, bool kInCluster>
__device__ __forceinline__ void multiply_run(const LinearArguments& a, char* shared,
                                             Stages<TilesShape<Weights, kRows, kAnyGroups>::kStages>& stages, int row_blocks) {
  using Shape = TilesShape<Weights, kRows, kAnyGroups>;
  constexpr int kAhead = Shape::kAhead, kTileVectors = Weights::kVectors * kWarp;
  constexpr bool kScalesSums = Shape::kScalesSums;
  constexpr int kWarpTiles = Shape::kWarpTiles, kSums = kRows / 2;
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % kWarp, group = lane / 4;
  const Run run = own_run<kInCluster>(a);
  if (!a.overlap) wait_for_earlier();

  // The next step to be asked for.
  int load_tile = run.first / a.steps, load_step = run.first % a.steps, to_load = run.end - run.first;
  uint32_t from[kWarpTiles], scales_from[kWarpTiles];  // 16-byte vectors of weights, words of scales
  const auto point = [&] {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
      const int tile = min(Shape::tile_of(load_tile / row_blocks, t), a.tiles - 1);
      from[t] = (uint32_t(tile) * a.chunks + load_step * kStepChunks) * kTileVectors + lane;
      scales_from[t] = uint32_t(tile) * a.groups * 8 + group;
    }
  };
  HeldStep<Weights, kAnyGroups> held[kAhead][kWarpTiles];
  const auto load = [&](HeldStep<Weights, kAnyGroups>& to, int t) {
    if (to_load == 0) return;
    // Past the last columns any weights will do: x is zero there.
    const uint32_t second = load_step * kStepChunks + 1 < a.chunks ? kTileVectors : 0;
#pragma unroll
    for (int chunk = 0; chunk < kStepChunks; ++chunk) {
#pragma unroll
      for (int v = 0; v < Weights::kVectors; ++v) {
        to.raw[chunk * Weights::kVectors + v] = load_once(a.weight + int64_t(from[t] + chunk * second + v * kWarp) * 16);
      }
    }
    if constexpr (Weights::kGrouped && !kAnyGroups) {
      to.scale[0] = __ldg(a.scales + (scales_from[t] + (load_step >> (a.group_shift - 2)) * 8));
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
  if (to_load > 0) point();
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) load(held[u][t], t);
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
        if (chunk == kStepChunks - 1) load(step[t], t);
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
          const AroundSums<T, Weights> around(a, Shape::tile_of(tile / row_blocks, t));
#pragma unroll
          for (int i = 0; i < kSums / 4; ++i) around.write(a, &sums[t][4 * i], tile % row_blocks * kRows + 8 * i);
        }
      }
    }
  }
}

template <class T, class Weights, int kRows, bool kAnyGroups, bool kInCluster>
__global__ void __launch_bounds__(TilesShape<Weights, kRows, kAnyGroups>::kThreads, 1)
    linear_tiles_kernel(const __grid_constant__ LinearArguments a) {
#if FUSELINE_HAS_WGMMA
  using Shape = TilesShape<Weights, kRows, kAnyGroups>;
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
