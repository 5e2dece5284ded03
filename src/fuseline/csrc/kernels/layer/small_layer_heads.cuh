// The small attention layer, forward, in two launches for all multiprocessors: first its heads.
//
// A cluster has kRows rows of x (a batch element, or two short ones) and heads of 64 elements together. Its blocks share the
// columns of q, k and v: each multiplies the rows with 64 / kParts columns of each, sends what it has made to the blocks
// that attend to it, and attends for its
// part of the queries, with the keys shared among its warps. What was attended to goes to L2, for the second launch
// (small_layer_out.cuh), which begins before this one ends.
//
// Moves into each multiprocessor (kRows + 192 / kParts) * E elements, 80 KB at 8 x (16, 512) in bf16 and 224 KB at 8 x (128,
// 512); does 2 B S E N operations, and 4 B H S^2 D to attend. Limit: below 8 x 128 x 512 the chain of latencies from
// launch to store, at 8 x 64 x 256 a third of it in shared memory's bandwidth; there, with products of warpgroups
// (warpgroup_product.cuh), what L2 gives, so that blocks of a cluster fetch for each other what they share.
#pragma once

#include "device/chunk_product.cuh"
#include "device/overlap.cuh"
#include "device/tensor_map.h"
#include "small_layer.cuh"
#include "warpgroup_product.cuh"

namespace fuseline {

template <class E>
struct SmallLayerForwardHeads {
  CUtensorMap x, weight;
  SmallLayer<E> layer;
  HeadsLayout layout;
};

template <class Math, int kRows, int kParts, bool kWarpgroups>
struct HeadsShape {
  using E = typename Math::Element;
  static constexpr ChunkTiles kTiles = heads_tiles(kRows, kParts, std::is_same_v<Math, Exact>, kWarpgroups);
  static constexpr int kColumns = kTiles.columns, kShare = kHeadsWidth / kParts;
  using Product = std::conditional_t<kWarpgroups, WarpgroupProduct<Math, kRows, kColumns, kTiles.splits>,
                                     ChunkProduct<Math, kRows, kColumns, kTiles.tall, kTiles.wide, kTiles.splits>>;
  static_assert(Product::kStage == kTiles.stage_bytes() && Product::kSumBytes == kTiles.sum_bytes());
  static constexpr int kKeys = heads_keys(kRows), kPitch = heads_pitch(sizeof(E));
  static constexpr bool kReuses = heads_reuse(kRows), kShares = heads_share(kRows, kWarpgroups);
  static constexpr bool kDirect = kWarpgroups && kRows == 128;  // a thread's sums are all of theirs
};

template <class Math, int kRows, int kParts, bool kWarpgroups>
__global__ void __launch_bounds__(kTileThreads, 1)
    small_layer_heads(const __grid_constant__ SmallLayerForwardHeads<typename Math::Element> of) {
#if __CUDA_ARCH__ >= 900
  using E = typename Math::Element;
  using Shape = HeadsShape<Math, kRows, kParts, kWarpgroups>;
  using Product = typename Shape::Product;
  constexpr int kShare = Shape::kShare, kPitch = Shape::kPitch, kKeys = Shape::kKeys;
  extern __shared__ __align__(1024) unsigned char memory[];

  const SmallLayer<E>& a = of.layer;
  const HeadsLayout& by = of.layout;
  const int part = blockIdx.x % kParts, group = blockIdx.x / kParts, first_block = group * kParts;
  const int heads_each = kHeadsWidth >> by.head_dim_log2, head = blockIdx.y * heads_each;
  const int batch = ((blockIdx.z << by.groups_log2) + group) << by.batches_log2;
  const int seqlen_mask = (1 << by.seqlen_log2) - 1;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + by.barriers);
  float* const biases = reinterpret_cast<float*>(memory + by.biases);
  const ChunkRing ring{shared_address(memory), barriers, barriers + kMostChunks, by.stages, by.chunks};
  const int kv_head = a.heads == a.kv_heads ? head : int(a.by_group.divide(uint32_t(head)));
  // The first column of qkv, and row of its weight, that this block makes of q, k or v.
  const auto column_of = [&](int which) {
    if (a.shared) return which * kHeadsWidth + part * kShare;
    const int h = which == 0 ? head : a.heads + (which - 1) * a.kv_heads + kv_head;
    return (h << by.head_dim_log2) + part * kShare;
  };

  if (threadIdx.x == kTileThreads - 1) fetch_tensor_map(&of.x), fetch_tensor_map(&of.weight);
  Product::begin(ring);
  uint64_t* const arrived = barriers + 2 * kMostChunks;  // q, k and v of the tasks of this block
  const int queries_log2 = by.seqlen_log2 - 4;           // tasks of a batch element and head
  const int all_log2 = 6 - by.head_dim_log2 + by.batches_log2 + queries_log2;
  if (threadIdx.x == 0) {
    const int pairs_log2 = max(0, by.tasks_log2 - queries_log2);  // a batch element's head
    const int rows = (2 << (pairs_log2 + by.seqlen_log2)) + (16 << by.tasks_log2);
    barrier_init(arrived, 1);
    publish_barriers();
    // Narrow heads lie in the columns of one block, which has them from itself.
    barrier_expect(arrived, rows * max(0, a.head_dim - kShare) * int(sizeof(E)));
  }
  __syncthreads();
  cluster_arrive_relaxed();
  const auto fetch = [&](int chunk, int stage) {
    const uint32_t to = ring.stages_at + stage * Product::kStage;
    uint64_t* const barrier = ring.full + stage;
    const int k = chunk * (kChunkBytes / int(sizeof(E)));
    barrier_expect(barrier, Product::kStage);
    if (Shape::kShares && by.groups_log2) {  // blocks with the same rows, and those with the same weights, take halves
      constexpr int kLines = kRows / kParts, kHalf = kShare / 2;
      const uint32_t same_rows = ((1u << kParts) - 1) << first_block, same_weights = (1u | 1u << kParts) << part;
#pragma unroll 1
      for (int element = 0; element < 1 << by.batches_log2; ++element) {
        copy_box(to + ((element << by.seqlen_log2) + part * kLines) * kChunkBytes, &of.x, barrier,
                 k + (a.shared ? head * kHeadsWidth : 0), part * kLines, batch + element, same_rows);
      }
#pragma unroll 1
      for (int which = 0; which < 3; ++which) {
        copy_box(to + (kRows + which * kShare + group * kHalf) * kChunkBytes, &of.weight, barrier, k,
                 column_of(which) + group * kHalf, 0, same_weights);
      }
      return;
    }
#pragma unroll 1
    for (int element = 0; element < 1 << by.batches_log2; ++element) {
      copy_box(to + (element << by.seqlen_log2) * kChunkBytes, &of.x, barrier, k + (a.shared ? head * kHeadsWidth : 0), 0,
               batch + element);
    }
#pragma unroll 1
    for (int which = 0; which < 3; ++which) {
      copy_box(to + (kRows + which * kShare) * kChunkBytes, &of.weight, barrier, k, column_of(which), 0);
    }
  };
  cluster_wait();  // all blocks of the cluster have their barriers; not later, where nothing else waits meanwhile
  wait_for_earlier();
  let_next_start();
  Product::fetch_first(ring, fetch);
  if (threadIdx.x < Shape::kColumns) {
    const int which = threadIdx.x / kShare;
    biases[threadIdx.x] = a.qkv_bias ? to_float(a.qkv_bias[column_of(which) + threadIdx.x - which * kShare]) : 0.f;
  }

  typename Product::Sums sums;
  Product::run(sums, ring, fetch);
  if constexpr (Shape::kReuses) cluster_arrive_relaxed();
  __syncthreads();

  // To those who attend: block `task >> tasks_log2` of the row group has the task.
  E* const tile = reinterpret_cast<E*>(memory + by.tile);
  const auto deliver = [&](int row, int n, const auto& vectors) {
    constexpr int kVectors = std::extent_v<std::remove_reference_t<decltype(vectors)>>;
    const int which = n / kShare, column = part * kShare + n % kShare;  // of 64
    const int element = row >> by.seqlen_log2, at = row & seqlen_mask;
    const int task = (((column >> by.head_dim_log2) << by.batches_log2) + element) << queries_log2;
    int first = task >> by.tasks_log2, last = (task + (1 << queries_log2) - 1) >> by.tasks_log2;
    if (which == 0) first = last = (task + (at >> 4)) >> by.tasks_log2;
    uint4* const to = reinterpret_cast<uint4*>(tile + row * kPitch + which * kHeadsWidth + column);
#pragma unroll 1
    for (int block = first; block <= last; ++block) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (block == part) {
          to[v] = vectors[v];
        } else {
          send_in_cluster(to + v, arrived, first_block + block, vectors[v]);
        }
      }
    }
    if (a.qkv && at < a.seqlen && batch + element < a.batch) {
      const int64_t m = int64_t(batch + element) * a.seqlen + at;
      uint4* const kept_at = reinterpret_cast<uint4*>(a.qkv + a.qkv_row(m, head) + column_of(which) + n % kShare);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) kept_at[v] = vectors[v];
    }
  };
  if constexpr (Shape::kDirect) {
    cluster_wait();  // none reads chunks any more
    const auto finish = [&](int row, int n, float& left, float& right) {
      const float2 bias = *reinterpret_cast<const float2*>(biases + n);
      const bool lives = (row & seqlen_mask) < a.seqlen;
      left = lives ? left + bias.x : 0.f, right = lives ? right + bias.y : 0.f;
    };
    Product::template each_vector<E>(sums, finish, [&](int row, int n, const uint4& vector) {
      const uint4 vectors[1] = {vector};
      deliver(row, n, vectors);
    });
  } else {
    float* const staging = reinterpret_cast<float*>(memory);
    Product::put(staging, sums);
    __syncthreads();
    if constexpr (Shape::kReuses) cluster_wait();  // and none reads chunks any more
#pragma unroll 1
    for (int item = threadIdx.x; item < kRows * Shape::kColumns / 8; item += kTileThreads) {
      const int row = item / (Shape::kColumns / 8), n = item % (Shape::kColumns / 8) * 8;
      const bool lives = (row & seqlen_mask) < a.seqlen;
      float values[8];
      Product::take(staging, row, n, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = lives ? values[i] + biases[n + i] : 0.f;
      uint4 vectors[sizeof(E) / 2];
      pack_eight<E>(values, vectors);
      deliver(row, n, vectors);
    }
  }
  __syncthreads();
  if (part << by.tasks_log2 >= 1 << all_log2) return;
  barrier_wait(arrived, 0);

  // Queries 16 to a task, a warp for each part of its keys.
  const int D = a.head_dim, sum_pitch = D + 8, width = a.heads << by.head_dim_log2;
  float* const partials = reinterpret_cast<float*>(memory + by.partials);
  const int units = 1 << (by.tasks_log2 + by.parts_log2);
  float2* const weights = reinterpret_cast<float2*>(partials + units * 16 * sum_pitch);  // the largest score and the sum
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kWarps) {
    const int task = (part << by.tasks_log2) + (unit >> by.parts_log2);
    const int query = (task & ((1 << queries_log2) - 1)) * 16, key = (unit & ((1 << by.parts_log2) - 1)) * kKeys;
    const int element = (task >> queries_log2) & ((1 << by.batches_log2) - 1), h = task >> (queries_log2 + by.batches_log2);
    float largest[2] = {-kInfinity, -kInfinity}, sum[2] = {0.f, 0.f};
    if (batch + element < a.batch && query < a.seqlen && key < a.seqlen && (!a.causal || key < query + 16)) {
      const E* const q = tile + ((element << by.seqlen_log2) + query) * kPitch + h * D;
      const E* const keys = tile + ((element << by.seqlen_log2) + key) * kPitch + kHeadsWidth + h * D;
      float scores[1][kKeys / 8][4] = {};
      multiply<Math, Order::rows, Order::rows>(scores, q, kPitch, keys, kPitch, D / Math::kUnit);
      exponentials(a, batch + element, head + h, query, key, scores[0], largest, sum);
      if (a.dropout.seed) {
        const uint64_t bits =
            kept<E, kKeys / 8>(a, uint64_t(*a.dropout.seed), batch + element, head + h, query, key);
#pragma unroll
        for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
          for (int w = 0; w < 4; ++w) scores[0][t][w] *= multiplier(a, bits, t, w);
        }
      }
      float attended[1][8][4] = {};
      multiply_held<Math>(attended[0], scores[0], keys + kHeadsWidth, kPitch, kKeys / 8);
      if (by.parts_log2 == 0) {
        E* const to = a.attended + (int64_t(batch + element) * a.seqlen + query) * width + ((head + h) << by.head_dim_log2);
        each_pair(attended, 0, 0, [&](int row, int d, float left, float right) {
          const float total = row >= 8 ? sum[1] : sum[0], by = total > 0.f ? 1.f / total : 0.f;
          if (query + row < a.seqlen && d < D) store_pair(to + int64_t(row) * width + d, left * by, right * by);
        });
        continue;
      }
      each_pair(attended, 0, 0, [&](int row, int d, float left, float right) {
        if (d < D) *reinterpret_cast<float2*>(partials + (unit * 16 + row) * sum_pitch + d) = make_float2(left, right);
      });
    }
    if (lane % 4 < 2) {
      const int half = lane % 4;
      weights[unit * 16 + lane / 4 + 8 * half] = make_float2(half ? largest[1] : largest[0], half ? sum[1] : sum[0]);
    }
  }
  if (by.parts_log2 == 0) return;
  __syncthreads();

  const int pieces_log2 = by.head_dim_log2 - 3;
#pragma unroll 1
  for (int item = threadIdx.x; item < (units >> by.parts_log2) << (4 + pieces_log2); item += kTileThreads) {
    const int d = (item & ((1 << pieces_log2) - 1)) * 8, row = item >> pieces_log2 & 15, mine = item >> (pieces_log2 + 4);
    const int task = (part << by.tasks_log2) + mine, query = (task & ((1 << queries_log2) - 1)) * 16 + row;
    const int element = (task >> queries_log2) & ((1 << by.batches_log2) - 1), h = task >> (queries_log2 + by.batches_log2);
    if (batch + element >= a.batch || query >= a.seqlen) continue;
    const int from = mine << by.parts_log2;
    float largest = -kInfinity, sum = 0.f, values[8] = {};
#pragma unroll 1
    for (int unit = from; unit < from + (1 << by.parts_log2); ++unit) largest = fmaxf(largest, weights[unit * 16 + row].x);
#pragma unroll 1
    for (int unit = from; unit < from + (1 << by.parts_log2); ++unit) {
      const float2 weight = weights[unit * 16 + row];
      if (weight.x == -kInfinity) continue;
      const float factor = exponential<E>(weight.x - largest);
      const float4* const at = reinterpret_cast<const float4*>(partials + (unit * 16 + row) * sum_pitch + d);
      const float4 low = at[0], high = at[1];
      sum = fmaf(factor, weight.y, sum);
      values[0] = fmaf(factor, low.x, values[0]), values[1] = fmaf(factor, low.y, values[1]);
      values[2] = fmaf(factor, low.z, values[2]), values[3] = fmaf(factor, low.w, values[3]);
      values[4] = fmaf(factor, high.x, values[4]), values[5] = fmaf(factor, high.y, values[5]);
      values[6] = fmaf(factor, high.z, values[6]), values[7] = fmaf(factor, high.w, values[7]);
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= inverse;
    uint4 vectors[sizeof(E) / 2];
    pack_eight<E>(values, vectors);
    const int64_t m = int64_t(batch + element) * a.seqlen + query;
    uint4* const to = reinterpret_cast<uint4*>(a.attended + m * width + ((head + h) << by.head_dim_log2) + d);
#pragma unroll
    for (int v = 0; v < int(sizeof(E) / 2); ++v) to[v] = vectors[v];
  }
#endif
}

// ---- launcher ----

template <class Math, int kRows, int kParts, bool kWarpgroups = false>
int launch_heads(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  using E = typename Math::Element;
  using Shape = HeadsShape<Math, kRows, kParts, kWarpgroups>;
  const LaunchShape& shape = plan.launches[0].shape;
  SmallLayerForwardHeads<E> of{};
  auto& a = of.layer;
  a = small_layer_of<E>(layer), of.layout = plan.heads;
  a.heads_each = kHeadsWidth / a.head_dim;
  const bool pairs = plan.heads.groups_log2 > 0;
  const int64_t k = a.shared ? a.head_dim : a.embed_dim, weight_rows = a.shared ? 3 * kHeadsWidth : a.projected;
  const int64_t row = int64_t(a.embed_dim) * int64_t(sizeof(E)), weight_row = k * int64_t(sizeof(E));
  constexpr bool kTf32 = std::is_same_v<Math, Tf32>;
  const int lines = (1 << plan.heads.seqlen_log2) / (pairs ? kParts : 1);
  int code = make_tensor_map(of.x, {a.x, a.embed_dim, a.seqlen, a.batch, row, row * a.seqlen, lines, layer.dtype, kTf32});
  if (code != 0) return code;
  code = make_tensor_map(of.weight, {a.qkv_weight, k, weight_rows, 1, weight_row, weight_row * weight_rows,
                                     Shape::kShare >> pairs, layer.dtype, kTf32});
  if (code != 0) return code;
  const unsigned across = unsigned(shape.cluster), head_groups = unsigned(a.heads / a.heads_each);
  const dim3 grid{across, head_groups, unsigned(shape.grid) / (across * head_groups)};
  return launch_of(small_layer_heads<Math, kRows, kParts, kWarpgroups>, of, grid, shape, device, stream);
}

// By products of warps.
template <class Math>
int launch_heads(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  if constexpr (std::is_same_v<Math, Exact>) {
    if (plan.launches[0].tiles.rows == 64) return launch_heads<Math, 64, 4>(layer, plan, device, stream);
  }
  return launch_heads<Math, 32, 4>(layer, plan, device, stream);
}

}  // namespace fuseline
