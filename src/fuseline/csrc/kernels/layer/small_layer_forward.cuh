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

// Rows of 16 of a warp and columns of 8, by the block's rows.
template <int kRows>
struct InShape {
  static constexpr int kTall = kRows / 32 + (kRows == 16), kWide = kRows == 16 ? 3 : 6;
};
template <int kRows>
struct OutShape {
  static constexpr int kTall = kRows / 32 + (kRows == 16), kWide = kRows == 16 ? 1 : 2;
};

template <class Math, int kRows>
constexpr int kForwardStages = forward_stages(kRows, sizeof(typename Math::Element));

template <class Math, int kRows>
using ProjectionIn = TileProduct<Math, Order::rows, Order::rows, kRows, kProjected, InShape<kRows>::kTall,
                                 InShape<kRows>::kWide, kForwardStages<Math, kRows>>;
template <class Math, int kRows>
using ProjectionOut = TileProduct<Math, Order::rows, Order::rows, kRows, kOutColumns, OutShape<kRows>::kTall,
                                  OutShape<kRows>::kWide, kForwardStages<Math, kRows>>;

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

template <class Math, int kRows>
int launch_forward(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  static_assert(ProjectionIn<Math, kRows>::kBytes == forward_ring(kRows, sizeof(typename Math::Element)));
  const LaunchShape& shape = plan.launches[0].shape;
  SmallLayerForward<typename Math::Element> of{small_layer_of<typename Math::Element>(layer), plan.forward};
  auto& a = of.layer;
  a.heads_each = plan.heads_each, a.workers = shape.cluster;
  a.rounds = int(divide_up(a.heads / a.heads_each, a.workers)), a.by_workers = Divisor(uint32_t(a.workers));
  return launch_of(small_layer_forward<Math, kRows>, of, dim3(unsigned(shape.grid)), shape, device, stream);
}

template <class Math>
int launch_forward(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  const int rows = plan.launches[0].tiles.rows;
  if constexpr (!std::is_same_v<Math, Exact>) {
    if (rows == 64) return launch_forward<Math, 64>(layer, plan, device, stream);
    if (rows == 128) return launch_forward<Math, 128>(layer, plan, device, stream);
  }
  return rows == 16 ? launch_forward<Math, 16>(layer, plan, device, stream)
                    : launch_forward<Math, 32>(layer, plan, device, stream);
}

}  // namespace fuseline
