// A product of a linear head, tile after tile, whose sums are worked on beside the next tile's products (Hopper).
//
// Blocks stay, and take tile after tile of 128 rows and 192 columns, in clusters of two whose blocks have neighbouring rows
// and the same columns. One thread fetches 64 of k at a time by bulk tensor copies, kHeadStages of them ahead, and half of
// the columns' for both blocks. Two warpgroups multiply, 64 rows each; each has two sets of sums, and works on one tile's in
// pieces (write them, or take their exponentials) while its products of the next are under way.
//
// Blocks at work together have all rows of a group and neighbouring columns: the right operand comes from memory once a
// group, and both stay in the L2 meanwhile.
#pragma once

#include <algorithm>

#include "chunk_product.cuh"
#include "launch.cuh"
#include "tensor_map.h"
#include "wgmma_wide.cuh"

namespace fuseline {

constexpr int kHeadRows = 128, kHeadWide = 192;  // of a block's tile
constexpr int kHeadCluster = 2;
constexpr int kHeadThreads = 384;  // two warpgroups that multiply, one of which one thread copies
constexpr int kHeadStep = 64;      // of k
constexpr int kHeadPieces = 12;    // of the work on a tile's sums; the steps of k are no fewer
constexpr int kHeadStages = 5;
constexpr int kHeadLeftBytes = kHeadRows * 128, kHeadStageBytes = kHeadLeftBytes + kHeadWide * 128;
constexpr int kHeadShared = kHeadStages * kHeadStageBytes + 1024 + 2 * kHeadStages * 8;
static_assert(kHeadShared <= 227 * 1024);

// A product [m, n] of left [m, k] and right [n, k]; an operand that is turned lies [k, m] or [k, n].
struct HeadTiles {
  CUtensorMap left, right;
  const int* wanted;  // 0 there: nothing is to be done. Or null
  int tiles, steps;
  int row_blocks;  // a cluster's
  int group;       // of these, that share what the L2 has of the right operand
  int items;       // row_blocks * tiles
};

// A tile: rows of the cluster from block * kHeadCluster * kHeadRows on, columns from tile * kHeadWide on. Groups of row
// blocks one after another; in a group tile after tile.
struct HeadPlace {
  int block, tile;
};

__host__ __device__ inline HeadPlace head_place(int item, int row_blocks, int tiles, int group) {
  const int whole = group * tiles, number = item / whole, first = number * group, at = item - number * whole;
  const int here = row_blocks - first < group ? row_blocks - first : group;
  return {first + at % here, at / here};
}

// Where a thread stands in the ring.
template <int kStages = kHeadStages>
struct HeadSlot {
  int slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// The first of a thread's rows of a tile's, whose other one is 8 on.
__device__ __forceinline__ int head_row(const HeadPlace& place, int rank) {
  return (place.block * kHeadCluster + rank) * kHeadRows + int(threadIdx.x) / kWarp * 16 + int(threadIdx.x) % kWarp / 4;
}

// What a warpgroup that multiplies goes through the ring with. Work: what is done with a tile's sums (head_loss.cuh,
// head_product.cuh).
template <class T, class Work, int kStages = kHeadStages>
struct HeadProducts {
  uint32_t base;  // of the ring
  int warpgroup;
  uint64_t *full, *empty;
  HeadSlot<kStages> at;
  int held = -1;  // slot that products read which nobody has waited for

  __device__ __forceinline__ void release(int slot) const {
    const int lane = int(threadIdx.x) % kWarp;
    if (lane < kHeadCluster) arrive_in_cluster(&empty[slot], lane);
  }

  __device__ __forceinline__ uint64_t left(uint32_t stage, int k) const {
    if constexpr (Work::kTurnLeft) {
      return Panels<kHeadRows, kHeadStep>{stage}.columns(warpgroup, k);
    } else {
      return Panels<kHeadStep, kHeadRows>{stage}.rows(64 * warpgroup, k);
    }
  }

  __device__ __forceinline__ uint64_t right(uint32_t stage, int k) const {
    if constexpr (Work::kTurnRight) {
      return Panels<kHeadWide, kHeadStep>{stage + kHeadLeftBytes}.columns(0, k);
    } else {
      return Panels<kHeadStep, kHeadWide>{stage + kHeadLeftBytes}.rows(0, k);
    }
  }

  // One step's products begin; those of the step before have ended.
  __device__ __forceinline__ void step(float (&sums)[24][4], bool first) {
    barrier_wait(&full[at.slot], at.parity);
    const uint32_t stage = base + at.slot * kHeadStageBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadStep / 16; ++k) {
      wgmma_192<T, Work::kTurnLeft, Work::kTurnRight>(sums, left(stage, k), right(stage, k), !first || k > 0);
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
  __device__ __forceinline__ void steps(const typename Work::Given& a, float (&sums)[24][4], Work& before,
                                        float (&others)[24][4]) {
    step(sums, p == 0);
    if constexpr (p == 0) {
      hold(others);
      before.begin(a, others);
    }
    before.template piece<p>(a, others);
    if constexpr (p + 1 < kHeadPieces) steps<p + 1>(a, sums, before, others);
  }

  // The products of a tile, and the work on the tile before it beside them.
  __device__ __forceinline__ void tile(const typename Work::Given& a, float (&sums)[24][4], Work& before,
                                       float (&others)[24][4]) {
    steps<0>(a, sums, before, others);
    before.finish(a);
#pragma unroll 1
    for (int s = kHeadPieces; s < a.steps; ++s) step(sums, false);
  }

  template <int p>
  __device__ __forceinline__ void rest(const typename Work::Given& a, Work& tile, const float (&sums)[24][4]) {
    tile.template piece<p>(a, sums);
    if constexpr (p + 1 < kHeadPieces) rest<p + 1>(a, tile, sums);
  }

  // The work on the last tile.
  __device__ __forceinline__ void last(const typename Work::Given& a, Work& tile, float (&sums)[24][4]) {
    end();
    hold(sums);
    tile.begin(a, sums);
    rest<0>(a, tile, sums);
    tile.finish(a);
  }
};

// One step's operands into a stage: this block's rows, and its half of the columns for both blocks.
template <class Work>
__device__ __forceinline__ void copy_head_step(const HeadTiles& a, uint32_t stage, uint64_t* full, int k, int row, int column,
                                               int rank) {
  if constexpr (Work::kTurnLeft) {
    copy_box(stage, &a.left, full, row, k, 0);
    copy_box(stage + kHeadLeftBytes / 2, &a.left, full, row + 64, k, 0);
  } else {
    copy_box(stage, &a.left, full, k, row, 0);
  }
  const uint32_t to = stage + kHeadLeftBytes;
  constexpr uint32_t kBoth = 3;
  if constexpr (Work::kTurnRight) {
    constexpr int kHalf = kHeadStep / 2;
#pragma unroll
    for (int i = 0; i < kHeadWide / 64; ++i) {
      copy_box(to + (i * kHeadStep + rank * kHalf) * 128, &a.right, full, column + 64 * i, k + rank * kHalf, 0, kBoth);
    }
  } else {
    constexpr int kHalf = kHeadWide / 2;
    copy_box(to + rank * kHalf * 128, &a.right, full, k, column + rank * kHalf, 0, kBoth);
  }
}

template <class T, class Work>
__global__ void __launch_bounds__(kHeadThreads, 1) head_kernel(const __grid_constant__ typename Work::Given a) {
#if FUSELINE_HAS_WGMMA
  extern __shared__ char raw[];
  if (a.wanted && *a.wanted == 0) return;
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  uint64_t* const full = reinterpret_cast<uint64_t*>(raw + (base - shared_address(raw)) + kHeadStages * kHeadStageBytes);
  uint64_t* const empty = full + kHeadStages;
  const int rank = int(blockIdx.x) % kHeadCluster, cluster = int(blockIdx.x) / kHeadCluster;
  const int clusters = int(gridDim.x) / kHeadCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kHeadStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], 8 * kHeadCluster);  // warps that multiply
    }
    publish_barriers();
  }
  cluster_arrive(), cluster_wait();
  __syncthreads();
  const int warpgroup = int(threadIdx.x) / 128;
  if (warpgroup == 2) {
    give_registers<24>();
    if (threadIdx.x == 256) {
      fetch_tensor_map(&a.left), fetch_tensor_map(&a.right);
      HeadSlot<> at;
      for (int item = cluster; item < a.items; item += clusters) {
        const HeadPlace place = head_place(item, a.row_blocks, a.tiles, a.group);
        const int row = (place.block * kHeadCluster + rank) * kHeadRows;
#pragma unroll 1
        for (int s = 0; s < a.steps; ++s) {
          barrier_wait(&empty[at.slot], at.parity ^ 1);
          barrier_expect(&full[at.slot], kHeadStageBytes);
          copy_head_step<Work>(a, base + at.slot * kHeadStageBytes, &full[at.slot], s * kHeadStep, row,
                               place.tile * kHeadWide, rank);
          at.advance();
        }
      }
    }
  } else {
    take_registers<240>();
    HeadProducts<T, Work> products{base, warpgroup, full, empty};
    Work tile;
    tile.none();
    float even[24][4], odd[24][4];
#pragma unroll
    for (int i = 0; i < 24; ++i) odd[i][0] = odd[i][1] = odd[i][2] = odd[i][3] = 0.f;
    int item = cluster;
#pragma unroll 1
    for (;;) {
      products.tile(a, even, tile, odd);
      tile.at(head_place(item, a.row_blocks, a.tiles, a.group), rank);
      item += clusters;
      if (item >= a.items) {
        products.last(a, tile, even);
        break;
      }
      products.tile(a, odd, tile, even);
      tile.at(head_place(item, a.row_blocks, a.tiles, a.group), rank);
      item += clusters;
      if (item >= a.items) {
        products.last(a, tile, odd);
        break;
      }
    }
  }
  cluster_arrive(), cluster_wait();  // no block goes while another may reach into it
#endif
}

// ---- launcher ----

// The tiles of a product [m, n] over k, and the descriptors of its operands; of the right one every `every`-th line is taken,
// and it has `lines`: beyond them are zeros.
template <class Work>
int head_operands(HeadTiles& a, const void* left, const void* right, int64_t m, int64_t n, int64_t k, int dtype,
                  int64_t every, int64_t lines) {
  const int64_t tiles = divide_up(n, kHeadWide), row_blocks = divide_up(m, kHeadCluster * kHeadRows);
  a.tiles = int(tiles), a.row_blocks = int(row_blocks), a.items = int(tiles * row_blocks), a.steps = int(divide_up(k, kHeadStep));
  a.group = int(std::min<int64_t>(row_blocks, k < 2048 ? 8 : 16));  // the fastest of 1 to 32 at 768, 4,096 and 50,304
  const auto operand = [&](CUtensorMap& map, const void* at, bool turned, int64_t length, int box, int box_of_k, int64_t step) {
    const int64_t rows = turned ? k : length, columns = turned ? length : k, bytes = 2 * columns * step;
    return make_tensor_map(map, {at, columns, rows, 1, bytes, bytes * rows, turned ? box_of_k : box, dtype});
  };
  const int error = operand(a.left, left, Work::kTurnLeft, m, kHeadRows, kHeadStep, 1);
  if (error != 0) return error;
  return operand(a.right, right, Work::kTurnRight, lines, kHeadWide / kHeadCluster, kHeadStep / kHeadCluster, every);
}

// Launches the product [m, n] over k, of every `every`-th line of `right`, if its tiles fill at least `full` of the time of the
// clusters that run at once. `right` has `lines` of the n (0: all), and counts as zeros beyond.
template <class T, class Work>
int run_head(typename Work::Given& a, const void* left, const void* right, int64_t m, int64_t n, int64_t k, int dtype,
             double full, void* stream, int64_t every = 1, int64_t lines = 0) {
  Device device;
  const cudaError_t found = current_device(device);
  if (found != cudaSuccess) return int(found);
  const auto kernel = head_kernel<T, Work>;
  int resident = 0;
  const cudaError_t asked = resident_clusters(kernel, device, kHeadThreads, size_t(kHeadShared), kHeadCluster, resident);
  if (asked != cudaSuccess) return int(asked);
  const int64_t tiles = divide_up(n, kHeadWide), row_blocks = divide_up(m, kHeadCluster * kHeadRows), items = tiles * row_blocks;
  if (resident == 0 || items > 0x3fffffff) return FUSELINE_UNSUPPORTED;
  const int64_t turns = divide_up(items, resident);
  if (double(m) * double(n) < full * double(turns * resident) * (kHeadCluster * kHeadRows * kHeadWide)) return FUSELINE_UNSUPPORTED;
  const int error = head_operands<Work>(a, left, right, m, n, k, dtype, every, lines ? lines : n);
  if (error != 0) return error;
  return launch(kernel, a, std::min<int64_t>(resident, items) * kHeadCluster, dim3(kHeadThreads), size_t(kHeadShared),
                kHeadCluster, stream);
}

}  // namespace fuseline
