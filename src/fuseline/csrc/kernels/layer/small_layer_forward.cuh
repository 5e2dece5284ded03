// The small attention layer, forward: the three phases of a batch element in one cluster, in one launch.
//
// Moves, from L2 for the most part: the weights once for each batch element, x once for each block. Does: 2 B S (N + out_dim) E
// + 4 B H S^2 D operations in tensor cores (FFMA for exact fp32). Limit: at S = 16 the weights on their way from L2
// into each multiprocessor (192 KB at 64 bytes a clock, E = 512), at S = 128 the tensor cores, of which H B blocks have
// only a part; below both the launch, a barrier, and the chain of latencies from x to out.
//
// Blocks: a cluster has a batch element, its blocks share the heads. A block
//   1. projects all rows to q, k, v of its heads: a product of kRows x up to 192 columns, into shared memory,
//   2. attends: a warp has 16 queries of a head and all keys, scores and probabilities in registers,
//   3. and, when all heads have been attended to, multiplies all rows with 64 columns of the output projection. Where there
//      is room these wait in shared memory since phase 2.
// Between 2 and 3 the heads meet in `attended`, in L2.
#pragma once

#include "device/overlap.cuh"
#include "small_layer.cuh"

namespace fuseline {

constexpr int kProjected = 192;  // columns of q, k, v that a block makes at a time
constexpr int kMostProjected = 384;
constexpr int kOutColumns = 64;

// Rows of 16 of a warp and columns of 8, by the block's rows.
template <int kRows>
struct InShape {
  static constexpr int kTall = kRows / 32 + (kRows == 16), kWide = kRows == 16 ? 3 : 6;
};
template <int kRows>
struct OutShape {
  static constexpr int kTall = kRows / 32 + (kRows == 16), kWide = kRows == 16 ? 1 : 2;
};

// Stages of the ring: few rows are a matter of bytes in flight, many of shared memory.
template <class Math, int kRows>
constexpr int kForwardStages = kRows <= 32 ? 4 : kRows == 128 && !kSixteen<Math> ? 2 : 3;

template <class Math, int kRows>
using ProjectionIn = TileProduct<Math, Order::rows, Order::rows, kRows, kProjected, InShape<kRows>::kTall,
                                 InShape<kRows>::kWide, kForwardStages<Math, kRows>>;
template <class Math, int kRows>
using ProjectionOut = TileProduct<Math, Order::rows, Order::rows, kRows, kOutColumns, OutShape<kRows>::kTall,
                                  OutShape<kRows>::kWide, kForwardStages<Math, kRows>>;

// Shared memory: q, k, v, and what products of narrow heads read past their last row, and drop; then the ring, whose place
// weights of the output projection take later, and what they multiply.
constexpr int kReadPast = 256;  // bytes; apart from the ring, which is written meanwhile

struct ForwardLayout {
  int pitch;       // of q, k, v
  int held_pitch;  // of the weights, and of the rows attended to, if these are held
  bool holds;
  size_t bytes;
};

template <class Math, int kRows>
ForwardLayout forward_layout(int heads_each, int head_dim, int attended, int most_bytes) {
  using E = typename Math::Element;
  ForwardLayout layout{};
  layout.pitch = padded<E>((3 * heads_each * head_dim + 15) / 16 * 16);
  layout.held_pitch = padded<E>((attended + 15) / 16 * 16);
  const size_t projected = size_t(kRows) * layout.pitch * sizeof(E) + kReadPast;
  const size_t held = size_t(kRows + kOutColumns) * layout.held_pitch * sizeof(E);
  const size_t ring = ProjectionIn<Math, kRows>::kBytes;
  layout.holds = projected + std::max(ring, held) <= size_t(most_bytes);
  layout.bytes = projected + (layout.holds ? std::max(ring, held) : ring);
  return layout;
}

template <class E>
struct SmallLayerForward {
  SmallLayer<E> layer;
  ForwardLayout layout;
};

// Queues copies of `lines` lines of `length` elements, `from` apart in memory and `pitch` in shared memory; lines from `there`
// on, and what of `room` elements lies behind a line, are zeros. The warps from `first_warp` on do it.
template <class E>
__device__ __forceinline__ void copy_lines(E* to, int pitch, const E* from, int length, int lines, int there, int room,
                                           int first_warp) {
  constexpr int kSize = 16 / int(sizeof(E));
#pragma unroll 1
  for (int line = int(threadIdx.x) / kWarp - first_warp; line < lines; line += kTileThreads / kWarp - first_warp) {
    if (line < 0) break;
    const E* const row = from + int64_t(line) * length;
#pragma unroll 1
    for (int at = threadIdx.x % kWarp * kSize; at < room; at += kWarp * kSize) {
      const bool wanted = line < there && at < length;
      copy_async<16>(to + line * pitch + at, wanted ? row + at : from, wanted);
    }
  }
}

template <class Math, int kRows>
__global__ void __launch_bounds__(kTileThreads, 1)
    small_layer_forward(const __grid_constant__ SmallLayerForward<typename Math::Element> of) {
#if __CUDA_ARCH__ >= 900
  using E = typename Math::Element;
  using In = ProjectionIn<Math, kRows>;
  using Out = ProjectionOut<Math, kRows>;
  constexpr int kKeyTiles = kRows / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int weight_rows[kMostProjected];
  __shared__ __align__(8) float biases[kMostProjected];
  __shared__ float out_biases[kOutColumns];

  const SmallLayer<E>& a = of.layer;
  const ForwardLayout& layout = of.layout;
  const int batch = int(a.by_workers.divide(blockIdx.x)), worker = blockIdx.x - batch * a.workers, rows = a.seqlen;
  const int64_t first = int64_t(batch) * rows;  // of all tokens
  const int width = a.heads_each * a.head_dim, attended = a.heads * a.head_dim;
  E* const qkv = reinterpret_cast<E*>(shared);
  E* const ring = qkv + kRows * layout.pitch + kReadPast / int(sizeof(E));
  const int warp = threadIdx.x / kWarp;
  const int room = layout.held_pitch - padded<E>(0);
  // Weights of `columns` of the output projection, to be held.
  const auto fetch_out_weights = [&](int column, int first_warp) {
    if (column >= a.out_dim) return;
    copy_lines(ring, layout.held_pitch, a.out_weight + int64_t(column) * attended, attended, kOutColumns, a.out_dim - column,
               room, first_warp);
    commit_copies();
  };

#pragma unroll 1
  for (int round = 0; round < a.rounds; ++round) {
    const int head = (worker + round * a.workers) * a.heads_each;
    if (head >= a.heads) break;
    for (int column = 0; column < 3 * width; column += kProjected) {
      typename In::FeedA from_x;
      typename In::FeedB from_weight;
      const E* const x = a.x + first * a.embed_dim + (a.shared ? head * a.head_dim : 0);
      const int length = a.shared ? a.head_dim : a.embed_dim;
      from_x.begin_rows(a.x, [&](int r) { return r < rows ? x + int64_t(r) * a.embed_dim : nullptr; });
      from_weight.begin_rows(a.qkv_weight, [&](int n) {
        return column + n < 3 * width ? a.qkv_weight + int64_t(a.weight_row(head, column + n)) * length : nullptr;
      });
      wait_for_earlier();
      let_next_start();
      In::begin(from_x, from_weight, ring, length);
      // While the first stages are on their way.
      if (threadIdx.x < kProjected && column + threadIdx.x < 3 * width) {
        const int n = column + threadIdx.x, row = a.weight_row(head, n);
        weight_rows[n] = row;
        biases[n] = a.qkv_bias ? to_float(a.qkv_bias[row]) : 0.f;
      }
      float sums[InShape<kRows>::kTall][InShape<kRows>::kWide][4] = {};
      In::finish(sums, from_x, from_weight, ring, length);
      each_pair(sums, In::row(), column + In::column(), [&](int row, int n, float left, float right) {
        if (n >= 3 * width) return;
        const float2 bias = *reinterpret_cast<const float2*>(biases + n);
        left = row < rows ? left + bias.x : 0.f, right = row < rows ? right + bias.y : 0.f;
        store_pair(qkv + row * layout.pitch + n, left, right);
        if (a.qkv && row < rows) store_pair(a.qkv + a.qkv_row(first + row, head) + weight_rows[n], left, right);
      });
    }
    __syncthreads();
    const int tasks = a.heads_each * (kRows / 16);
    if (layout.holds && round + 1 == a.rounds) {  // by the warps that have nothing to attend to, if there are such
      fetch_out_weights(worker * kOutColumns, tasks < kTileThreads / kWarp ? tasks : 0);
    }

    for (int task = warp; task < tasks; task += kTileThreads / kWarp) {
      const int h = task / (kRows / 16), row = task % (kRows / 16) * 16;
      if (row >= rows) continue;
      const E* const q = qkv + row * layout.pitch + h * a.head_dim;
      const E* const keys = qkv + width + h * a.head_dim;
      float scores[1][kKeyTiles][4] = {};
      multiply<Math, Order::rows, Order::rows>(scores, q, layout.pitch, keys, layout.pitch, a.head_dim / Math::kUnit);
      float inverse[2];
      exponentials(a, batch, head + h, row, scores[0], inverse);
      if (a.dropout.seed) {
        const uint64_t bits = kept<E, kKeyTiles>(a, uint64_t(*a.dropout.seed), batch, head + h, row);
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
          for (int w = 0; w < 4; ++w) scores[0][t][w] *= multiplier(a, bits, t, w);
        }
      }
      for (int column = 0; column < a.head_dim; column += 64) {
        float sums[1][8][4] = {};
        multiply_held<Math>(sums[0], scores[0], keys + width + column, layout.pitch, kKeyTiles);
        E* const to = a.attended + first * attended + (head + h) * a.head_dim;
        each_pair(sums, row, column, [&](int r, int d, float left, float right) {
          const float by = r - row >= 8 ? inverse[1] : inverse[0];
          if (r < rows && d < a.head_dim) store_pair(to + int64_t(r) * attended + d, left * by, right * by);
        });
      }
    }
    __syncthreads();  // the next round overwrites q, k, v
  }
  if (a.workers > 1) {
    cluster_arrive();
    // A block without heads in the last round has not asked for its weights yet.
    if (layout.holds && (worker + (a.rounds - 1) * a.workers) * a.heads_each >= a.heads) fetch_out_weights(worker * kOutColumns, 0);
    cluster_wait();
  }

  for (int column = worker * kOutColumns; column < a.out_dim; column += a.workers * kOutColumns) {
    if (threadIdx.x < kOutColumns) {
      const int n = column + threadIdx.x;
      out_biases[threadIdx.x] = a.out_bias && n < a.out_dim ? to_float(a.out_bias[n]) : 0.f;
    }
    const E* const at = a.attended + first * attended;
    float sums[OutShape<kRows>::kTall][OutShape<kRows>::kWide][4] = {};
    if (layout.holds) {
      E* const held = ring + kOutColumns * layout.held_pitch;
      if (column == worker * kOutColumns) {
        copy_lines(held, layout.held_pitch, at, attended, kRows, rows, room, 0);
        commit_copies();
      } else {
        __syncthreads();
        fetch_out_weights(column, 0);
      }
      wait_for_all();
      __syncthreads();
      multiply<Math, Order::rows, Order::rows>(sums, held + Out::row() * layout.held_pitch, layout.held_pitch,
                                               ring + Out::column() * layout.held_pitch, layout.held_pitch,
                                               room / Math::kUnit);
    } else {
      typename Out::FeedA from_attended;
      typename Out::FeedB from_weight;
      from_attended.begin_rows(at, [&](int r) { return r < rows ? at + int64_t(r) * attended : nullptr; });
      from_weight.begin_rows(a.out_weight, [&](int n) {
        return column + n < a.out_dim ? a.out_weight + int64_t(column + n) * attended : nullptr;
      });
      Out::run(sums, from_attended, from_weight, ring, attended);
    }
    each_pair(sums, Out::row(), Out::column(), [&](int row, int n, float left, float right) {
      if (row >= rows || column + n >= a.out_dim) return;
      store_pair(a.out + (first + row) * a.out_dim + column + n, left + out_biases[n], right + out_biases[n + 1]);
    });
    __syncthreads();
  }
#endif
}

// ---- launcher ----

// How a layer is laid over blocks: heads that a block has at a time, and blocks of a cluster.
struct ForwardPlan {
  int heads_each, workers;
};

inline ForwardPlan forward_plan(const fuseline_small_layer& layer) {
  const int H = int(layer.num_heads), D = int(layer.head_dim);
  ForwardPlan plan{layer.shared_projection ? 1 : std::max(1, std::min(H, 64 / D)), 1};
  while (H % plan.heads_each != 0) --plan.heads_each;
  while (plan.workers * 2 <= std::min(H / plan.heads_each, kMaxCluster)) plan.workers *= 2;
  return plan;
}

template <class Math, int kRows>
int launch_forward(const fuseline_small_layer& layer, const Device& device, bool only_asking, void* stream) {
  SmallLayerForward<typename Math::Element> of{small_layer_of<typename Math::Element>(layer), {}};
  auto& a = of.layer;
  const ForwardPlan plan = forward_plan(layer);
  a.heads_each = plan.heads_each, a.workers = plan.workers;
  a.rounds = int(divide_up(a.heads / a.heads_each, a.workers)), a.by_workers = Divisor(uint32_t(a.workers));
  constexpr int kTables = kMostProjected * 8 + kOutColumns * 4;
  const int most = device.shared_a_block - kTables;
  of.layout = forward_layout<Math, kRows>(a.heads_each, a.head_dim, a.heads * a.head_dim, most);
  if (of.layout.bytes > size_t(most)) return FUSELINE_UNSUPPORTED;
  if (only_asking) return 0;
  const auto kernel = small_layer_forward<Math, kRows>;
  int count = 0;
  const cudaError_t error = resident_clusters(kernel, device, kTileThreads, of.layout.bytes, a.workers, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  return launch_overlapping(kernel, of, dim3(unsigned(a.batch * a.workers)), kTileThreads, of.layout.bytes, a.workers, stream);
}

template <class Math>
int run_in_one_launch(const fuseline_small_layer& layer, const Device& device, bool only_asking, void* stream) {
  if (layer.seqlen <= 16) return launch_forward<Math, 16>(layer, device, only_asking, stream);
  if (layer.seqlen <= 32) return launch_forward<Math, 32>(layer, device, only_asking, stream);
  if (layer.seqlen <= 64) return launch_forward<Math, 64>(layer, device, only_asking, stream);
  // Without tensor cores so many rows are the composition's: 166 us, where torch's own product and attention take 83.
  if constexpr (std::is_same_v<Math, Exact>) {
    return FUSELINE_UNSUPPORTED;
  } else {
    return launch_forward<Math, 128>(layer, device, only_asking, stream);
  }
}

}  // namespace fuseline
