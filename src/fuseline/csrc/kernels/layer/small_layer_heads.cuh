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
// (small_layer_wgmma.cuh), what L2 gives, so that blocks of a cluster fetch for each other what they share.
#pragma once

#include "device/chunk_product.cuh"
#include "device/overlap.cuh"
#include "small_layer_wgmma.h"
#include "device/tensor_map.h"
#include "warpgroup_product.cuh"

namespace fuseline {

constexpr int kHeadsWidth = 64;  // of q that a cluster makes: of one head, or of several narrow ones

template <class E>
struct SmallLayerForwardHeads {
  CUtensorMap x, weight;
  SmallLayer<E> layer;
  int batches_log2;      // batch elements of a row group
  int groups_log2;       // row groups of a cluster: if there are two, all its blocks fetch for each other
  int seqlen_log2;       // rows of each, a power of two
  int head_dim_log2;
  int tasks_log2;        // of 16 queries and a head, that a block attends for
  int parts_log2;        // of the keys, in which a task is shared among warps
  int stages, chunks;    // of k
  int tile, partials, barriers, biases;  // where these begin in shared memory, bytes
};

template <class Math, int kRows, int kParts, bool kWarpgroups>
struct HeadsShape {
  using E = typename Math::Element;
  static constexpr int kColumns = 3 * kHeadsWidth / kParts, kShare = kHeadsWidth / kParts;
  // Without tensor cores shared memory is what limits, of which a square of sums reads least (8 x (64, 256): 29.8 us with 3
  // wide, 30.9 with 6; 8 x (16, 512): 23.0 and 25.4).
  static constexpr bool kSquare = std::is_same_v<Math, Exact>;
  static constexpr int kTall = kRows == 128 || kSquare ? 2 : 1, kWide = kSquare ? 3 : 6;
  static constexpr int kSplits = kWarps / (kRows / (16 * kTall) * (kColumns / (8 * kWide)));
  using Product = std::conditional_t<kWarpgroups, WarpgroupProduct<Math, kRows, kColumns, 128 / kRows>,
                                     ChunkProduct<Math, kRows, kColumns, kTall, kWide, kSplits>>;
  static constexpr int kKeys = kRows == 128 ? 64 : 16;  // of a warp
  static constexpr int kPitch = padded<E>(3 * kHeadsWidth);  // of q, k and v
  static constexpr int kTileBytes = kRows * kPitch * int(sizeof(E));
  static constexpr bool kReuses = kRows == 128;  // q, k and v lie where the chunks lay
  static constexpr bool kShares = kWarpgroups && kRows == 64;  // what is fetched, with blocks of its cluster
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
  const int part = blockIdx.x % kParts, group = blockIdx.x / kParts, first_block = group * kParts;
  const int heads_each = kHeadsWidth >> of.head_dim_log2, head = blockIdx.y * heads_each;
  const int batch = ((blockIdx.z << of.groups_log2) + group) << of.batches_log2;
  const int seqlen_mask = (1 << of.seqlen_log2) - 1;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + of.barriers);
  float* const biases = reinterpret_cast<float*>(memory + of.biases);
  const ChunkRing ring{shared_address(memory), barriers, barriers + kMostChunks, of.stages, of.chunks};
  const int kv_head = a.heads == a.kv_heads ? head : int(a.by_group.divide(uint32_t(head)));
  // The first column of qkv, and row of its weight, that this block makes of q, k or v.
  const auto column_of = [&](int which) {
    if (a.shared) return which * kHeadsWidth + part * kShare;
    const int h = which == 0 ? head : a.heads + (which - 1) * a.kv_heads + kv_head;
    return (h << of.head_dim_log2) + part * kShare;
  };

  if (threadIdx.x == kTileThreads - 1) fetch_tensor_map(&of.x), fetch_tensor_map(&of.weight);
  Product::begin(ring);
  uint64_t* const arrived = barriers + 2 * kMostChunks;  // q, k and v of the tasks of this block
  const int queries_log2 = of.seqlen_log2 - 4;           // tasks of a batch element and head
  const int all_log2 = 6 - of.head_dim_log2 + of.batches_log2 + queries_log2;
  if (threadIdx.x == 0) {
    const int pairs_log2 = max(0, of.tasks_log2 - queries_log2);  // a batch element's head
    const int rows = (2 << (pairs_log2 + of.seqlen_log2)) + (16 << of.tasks_log2);
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
    if (Shape::kShares && of.groups_log2) {  // blocks with the same rows, and those with the same weights, take halves
      constexpr int kLines = kRows / kParts, kHalf = kShare / 2;
      const uint32_t same_rows = ((1u << kParts) - 1) << first_block, same_weights = (1u | 1u << kParts) << part;
#pragma unroll 1
      for (int element = 0; element < 1 << of.batches_log2; ++element) {
        copy_box(to + ((element << of.seqlen_log2) + part * kLines) * kChunkBytes, &of.x, barrier,
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
    for (int element = 0; element < 1 << of.batches_log2; ++element) {
      copy_box(to + (element << of.seqlen_log2) * kChunkBytes, &of.x, barrier, k + (a.shared ? head * kHeadsWidth : 0), 0,
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
  E* const tile = reinterpret_cast<E*>(memory + of.tile);
  const auto deliver = [&](int row, int n, const auto& vectors) {
    constexpr int kVectors = std::extent_v<std::remove_reference_t<decltype(vectors)>>;
    const int which = n / kShare, column = part * kShare + n % kShare;  // of 64
    const int element = row >> of.seqlen_log2, at = row & seqlen_mask;
    const int task = (((column >> of.head_dim_log2) << of.batches_log2) + element) << queries_log2;
    int first = task >> of.tasks_log2, last = (task + (1 << queries_log2) - 1) >> of.tasks_log2;
    if (which == 0) first = last = (task + (at >> 4)) >> of.tasks_log2;
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
  if (part << of.tasks_log2 >= 1 << all_log2) return;
  barrier_wait(arrived, 0);

  // Queries 16 to a task, a warp for each part of its keys.
  const int D = a.head_dim, sum_pitch = D + 8, width = a.heads << of.head_dim_log2;
  float* const partials = reinterpret_cast<float*>(memory + of.partials);
  const int units = 1 << (of.tasks_log2 + of.parts_log2);
  float2* const weights = reinterpret_cast<float2*>(partials + units * 16 * sum_pitch);  // the largest score and the sum
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kWarps) {
    const int task = (part << of.tasks_log2) + (unit >> of.parts_log2);
    const int query = (task & ((1 << queries_log2) - 1)) * 16, key = (unit & ((1 << of.parts_log2) - 1)) * kKeys;
    const int element = (task >> queries_log2) & ((1 << of.batches_log2) - 1), h = task >> (queries_log2 + of.batches_log2);
    float largest[2] = {-kInfinity, -kInfinity}, sum[2] = {0.f, 0.f};
    if (batch + element < a.batch && query < a.seqlen && key < a.seqlen && (!a.causal || key < query + 16)) {
      const E* const q = tile + ((element << of.seqlen_log2) + query) * kPitch + h * D;
      const E* const keys = tile + ((element << of.seqlen_log2) + key) * kPitch + kHeadsWidth + h * D;
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
      if (of.parts_log2 == 0) {
        E* const to = a.attended + (int64_t(batch + element) * a.seqlen + query) * width + ((head + h) << of.head_dim_log2);
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
  if (of.parts_log2 == 0) return;
  __syncthreads();

  const int pieces_log2 = of.head_dim_log2 - 3;
#pragma unroll 1
  for (int item = threadIdx.x; item < (units >> of.parts_log2) << (4 + pieces_log2); item += kTileThreads) {
    const int d = (item & ((1 << pieces_log2) - 1)) * 8, row = item >> pieces_log2 & 15, mine = item >> (pieces_log2 + 4);
    const int task = (part << of.tasks_log2) + mine, query = (task & ((1 << queries_log2) - 1)) * 16 + row;
    const int element = (task >> queries_log2) & ((1 << of.batches_log2) - 1), h = task >> (queries_log2 + of.batches_log2);
    if (batch + element >= a.batch || query >= a.seqlen) continue;
    const int from = mine << of.parts_log2;
    float largest = -kInfinity, sum = 0.f, values[8] = {};
#pragma unroll 1
    for (int unit = from; unit < from + (1 << of.parts_log2); ++unit) largest = fmaxf(largest, weights[unit * 16 + row].x);
#pragma unroll 1
    for (int unit = from; unit < from + (1 << of.parts_log2); ++unit) {
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
    uint4* const to = reinterpret_cast<uint4*>(a.attended + m * width + ((head + h) << of.head_dim_log2) + d);
#pragma unroll
    for (int v = 0; v < int(sizeof(E) / 2); ++v) to[v] = vectors[v];
  }
#endif
}

// ---- launcher ----

inline int log2_of(int64_t power) {
  int log2 = 0;
  while (int64_t(1) << log2 < power) ++log2;
  return log2;
}

// Whether heads of this size come in clusters, and whether lines of x and the weight may be fetched in chunks.
inline bool comes_in_clusters(const fuseline_small_layer& layer) {
  const int64_t D = layer.head_dim, each = D > 0 ? kHeadsWidth / D : 0;
  if (D != 16 && D != 32 && D != 64) return false;
  if (layer.num_heads % each != 0 || (each > 1 && layer.num_kv_heads != layer.num_heads)) return false;
  return !layer.shared_projection || D == kHeadsWidth;
}

template <class Math, int kRows, int kParts, bool kWarpgroups = false>
int launch_heads_forward(const fuseline_small_layer& layer, const Device& device, void* stream) {
  using E = typename Math::Element;
  using Shape = HeadsShape<Math, kRows, kParts, kWarpgroups>;
  using Product = typename Shape::Product;
  SmallLayerForwardHeads<E> of{};
  auto& a = of.layer;
  a = small_layer_of<E>(layer);
  const int k = a.shared ? a.head_dim : a.embed_dim;
  of.chunks = int(divide_up(int64_t(k) * int64_t(sizeof(E)), kChunkBytes));
  of.head_dim_log2 = log2_of(a.head_dim);
  of.seqlen_log2 = std::max(4, log2_of(a.seqlen));
  of.batches_log2 = log2_of(kRows) - of.seqlen_log2;
  a.heads_each = kHeadsWidth / a.head_dim;
  const int tasks = 6 - of.head_dim_log2 + log2_of(kRows) - 4;  // log2, of a row group
  of.tasks_log2 = std::max(0, tasks - log2_of(kParts));
  of.parts_log2 = std::max(0, of.seqlen_log2 - log2_of(Shape::kKeys));

  const int units = 1 << (of.tasks_log2 + of.parts_log2);
  const int partial_bytes = units * 16 * ((a.head_dim + 8) * 4 + 8);
  constexpr int kBehind = kMostChunks * 16 + 16 + Shape::kColumns * 4;
  // Clusters of four find room for all at once only if two blocks fit a multiprocessor.
  const int most = kParts >= 4 ? std::min(device.shared_a_block, device.shared_a_processor / 2 - 1024) : device.shared_a_block;
  const int room = most - kBehind - (Shape::kReuses ? 0 : Shape::kTileBytes);
  of.stages = Product::stages(of.chunks, room);
  if (of.stages < std::min(of.chunks, Product::kSplitsOfChunks)) return FUSELINE_UNSUPPORTED;
  int used = std::max(of.stages * Product::kStage, Product::kSumBytes + partial_bytes);
  of.partials = Product::kSumBytes, of.tile = used;
  if (Shape::kReuses) {
    // Products of narrow heads read past the last row of v, and drop what they get: not from what is written meanwhile.
    const int read_past = a.head_dim < kHeadsWidth ? 256 : 0;
    of.tile = Product::kSumBytes, of.partials = of.tile + Shape::kTileBytes + read_past;
    used = std::max(used, of.partials + partial_bytes);
  } else {
    used += Shape::kTileBytes;
  }
  of.barriers = used, of.biases = used + kMostChunks * 16 + 16;
  const size_t bytes = size_t(used + kBehind);
  if (bytes > size_t(device.shared_a_block)) return FUSELINE_UNSUPPORTED;

  const auto kernel = small_layer_heads<Math, kRows, kParts, kWarpgroups>;
  const int64_t groups = divide_up(a.batch, int64_t(1) << of.batches_log2);
  const int64_t head_groups = a.heads / a.heads_each;
  int count = 0;
  cudaError_t error = resident_clusters(kernel, device, kTileThreads, bytes, kParts, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  if (Shape::kShares && of.stages == of.chunks && groups % 2 == 0) {
    int twice = 0;
    error = resident_clusters(kernel, device, kTileThreads, bytes, 2 * kParts, twice);
    if (error != cudaSuccess) return int(error);
    of.groups_log2 = twice >= std::min<int64_t>(count / 2, head_groups * groups / 2);
  }
  const int64_t row = int64_t(a.embed_dim) * int64_t(sizeof(E)), weight_row = int64_t(k) * int64_t(sizeof(E));
  const int64_t weight_rows = a.shared ? 3 * kHeadsWidth : a.projected;
  constexpr bool kTf32 = std::is_same_v<Math, Tf32>;
  const int lines = (1 << of.seqlen_log2) / (of.groups_log2 ? kParts : 1);
  int code = make_tensor_map(of.x, {a.x, a.embed_dim, a.seqlen, a.batch, row, row * a.seqlen, lines, layer.dtype, kTf32});
  if (code != 0) return code;
  code = make_tensor_map(of.weight, {a.qkv_weight, k, weight_rows, 1, weight_row, weight_row * weight_rows,
                                     Shape::kShare >> of.groups_log2, layer.dtype, kTf32});
  if (code != 0) return code;
  const dim3 grid{unsigned(kParts << of.groups_log2), unsigned(head_groups), unsigned(groups >> of.groups_log2)};
  return launch_overlapping(kernel, of, grid, kTileThreads, bytes, int(grid.x), stream);
}

// Blocks of a cluster by measurement. 8 x (64, 256) in bf16 and TF32: 8.1 and 13.0 us with two, 9.0 and 14.4 with four, which
// send each other more; without tensor cores, and at 8 x (16, 512) in TF32, the product itself wants more of them.
template <class Math>
int run_heads_forward(const fuseline_small_layer& layer, const Device& device, void* stream) {
  if (layer.seqlen <= 32) return launch_heads_forward<Math, 32, 4>(layer, device, stream);
  if constexpr (std::is_same_v<Math, Exact>) {
    if (layer.seqlen <= 64) return launch_heads_forward<Math, 64, 4>(layer, device, stream);
  } else {
    if (device.warpgroups) return heads_by_warpgroups<Math>(layer, device, stream);
  }
  return FUSELINE_UNSUPPORTED;  // one launch takes it, or none does
}

}  // namespace fuseline
