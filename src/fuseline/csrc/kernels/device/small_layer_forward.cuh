// The small attention layer, forward: the three phases of a batch element in one cluster, in one launch.
//
// Moves, from L2 for the most part: the weights once for each batch element and tile of rows, x once for each block.
// Does: 2 B S (N + out_dim) E + 4 B H S^2 D operations in tensor cores (FFMA for exact fp32). Limit: at S = 16 the weights
// on their way from L2 into each multiprocessor (192 KB at 64 bytes a clock, E = 512), at S = 128 the tensor cores; below
// both the launch and two barriers.
//
// Blocks: a cluster has a batch element. Its blocks share the heads and, over 64 rows, the rows. A block
//   1. projects its rows to q, k, v of its heads: a product of kRows x up to 192 columns, into shared memory,
//   2. attends: a warp has 16 queries of a head and all keys, scores and probabilities in registers (the keys of other
//      tiles of rows come from their blocks' shared memory),
//   3. and, when all heads have been attended to, multiplies its rows with 64 columns of the output projection.
// Between 2 and 3 the heads meet in `attended`, in L2.
#pragma once

#include "small_layer.cuh"

namespace fuseline {

constexpr int kProjected = 192;  // columns of q, k, v that a block makes at a time
constexpr int kOutColumns = 64;

template <class Math, int kRows>
using ProjectionIn = TileProduct<Math, Order::rows, Order::rows, kRows, kProjected, kRows == 64 ? 2 : 1, kRows == 16 ? 3 : 6>;
template <class Math, int kRows>
using ProjectionOut =
    TileProduct<Math, Order::rows, Order::rows, kRows, kOutColumns, kRows == 64 ? 2 : 1, kRows == 16 ? 1 : 2>;

// Shared memory: q, k, v of this block's rows; then the ring, whose place the keys and values of all rows take later.
template <class E>
struct ForwardLayout {
  int pitch;       // of q, k, v
  int keys_pitch;  // of keys and values of all rows
  __host__ __device__ ForwardLayout(int heads_each, int head_dim)
      : pitch(padded<E>((3 * heads_each * head_dim + 15) / 16 * 16)), keys_pitch(padded<E>(2 * heads_each * head_dim)) {}
};

template <class Math, int kRows>
size_t forward_shared(int heads_each, int head_dim, int tiles) {
  using E = typename Math::Element;
  const ForwardLayout<E> layout(heads_each, head_dim);
  const int ring = ProjectionIn<Math, kRows>::kBytes, keys = tiles > 1 ? tiles * kRows * layout.keys_pitch * int(sizeof(E)) : 0;
  constexpr int kOver = 256;  // products of narrow heads read past the last row, and drop what they get
  return size_t(kRows) * layout.pitch * sizeof(E) + std::max(ring, keys) + kOver;
}

// 16 bytes of the shared memory of block `rank`, at the place of `here`.
__device__ __forceinline__ uint4 load_from_cluster(const void* here, int rank) {
  uint4 value = make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .u32 remote;\n"
      " mapa.shared::cluster.u32 remote, %4, %5;\n"
      " ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "r"(uint32_t(__cvta_generic_to_shared(here))), "r"(rank)
      : "memory");
#endif
  return value;
}

template <class Math, int kRows, int kKeyTiles>
__global__ void __launch_bounds__(kTileThreads, 1)
    small_layer_forward(const __grid_constant__ SmallLayer<typename Math::Element> a) {
#if __CUDA_ARCH__ >= 900
  using E = typename Math::Element;
  using In = ProjectionIn<Math, kRows>;
  using Out = ProjectionOut<Math, kRows>;
  constexpr int kSize = 16 / int(sizeof(E));
  extern __shared__ __align__(16) unsigned char shared[];

  const int cluster = a.workers * a.tiles;
  const int batch = blockIdx.x / cluster, rank = blockIdx.x % cluster;
  const int tile = rank % a.tiles, worker = rank / a.tiles;
  const int first_row = tile * kRows, rows = min(kRows, a.seqlen - first_row);
  const int64_t first = int64_t(batch) * a.seqlen + first_row;  // of all tokens
  const int width = a.heads_each * a.head_dim, attended = a.heads * a.head_dim;
  const ForwardLayout<E> layout(a.heads_each, a.head_dim);
  E* const qkv = reinterpret_cast<E*>(shared);
  E* const ring = qkv + kRows * layout.pitch;
  const int warp = threadIdx.x / kWarp;
  const auto meet = [&] {
    if (cluster > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  };

  // What the last phase will read is fetched into L2 meanwhile.
  const int out_rows = min(kOutColumns, a.out_dim - worker * kOutColumns), lines = attended * int(sizeof(E)) / 128;
  for (int line = threadIdx.x + tile * kTileThreads; line < out_rows * lines; line += kTileThreads * a.tiles) {
    const E* const at = a.out_weight + int64_t(worker * kOutColumns + line / lines) * attended;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at + line % lines * (128 / int(sizeof(E)))));
  }

  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const int rounds = (a.heads / a.heads_each + a.workers - 1) / a.workers;
  for (int round = 0; round < rounds; ++round) {
    const int head = (worker + round * a.workers) * a.heads_each;
    const bool busy = head < a.heads;
    if (round > 0 && a.tiles > 1) meet();  // the other tiles have read the keys of the round before

    for (int column = 0; busy && column < 3 * width; column += kProjected) {
      typename In::FeedA from_x;
      typename In::FeedB from_weight;
      const E* const x = a.x + first * a.embed_dim + (a.shared ? head * a.head_dim : 0);
      const int length = a.shared ? a.head_dim : a.embed_dim;
      from_x.begin_rows(a.x, [&](int r) { return r < rows ? x + int64_t(r) * a.embed_dim : nullptr; });
      from_weight.begin_rows(a.qkv_weight, [&](int n) {
        return column + n < 3 * width ? a.qkv_weight + int64_t(a.weight_row(head, column + n)) * length : nullptr;
      });
      float sums[kRows == 64 ? 2 : 1][kRows == 16 ? 3 : 6][4] = {};
      In::run(sums, from_x, from_weight, ring, length);
      each_pair(sums, In::row(), column + In::column(), [&](int row, int n, float left, float right) {
        if (n >= 3 * width) return;
        const int at = a.weight_row(head, n);
        if (a.qkv_bias) left += to_float(a.qkv_bias[at]), right += to_float(a.qkv_bias[at + 1]);
        if (row >= rows) left = right = 0.f;
        store_pair(qkv + row * layout.pitch + n, left, right);
        if (a.qkv && row < rows) store_pair(a.qkv + a.qkv_row(first + row, head) + at, left, right);
      });
    }

    const E *keys = qkv + width, *values = qkv + 2 * width;
    int keys_pitch = layout.pitch;
    if (a.tiles > 1) {
      meet();
      const int pieces = 2 * width / kSize;
      for (int piece = threadIdx.x; busy && piece < a.tiles * kRows * pieces; piece += kTileThreads) {
        const int row = piece / pieces, at = piece % pieces * kSize;
        *reinterpret_cast<uint4*>(ring + row * layout.keys_pitch + at) =
            load_from_cluster(qkv + row % kRows * layout.pitch + width + at, worker * a.tiles + row / kRows);
      }
      keys = ring, values = ring + width, keys_pitch = layout.keys_pitch;
    }
    __syncthreads();

    for (int task = warp; busy && task < a.heads_each * (kRows / 16); task += kTileThreads / kWarp) {
      const int h = task / (kRows / 16), row = task % (kRows / 16) * 16;
      if (row >= rows) continue;
      float scores[1][kKeyTiles][4] = {};
      multiply<Math, Order::rows, Order::rows>(scores, qkv + row * layout.pitch + h * a.head_dim, layout.pitch,
                                               keys + h * a.head_dim, keys_pitch, a.head_dim / Math::kUnit);
      float inverse[2];
      exponentials(a, batch, head + h, first_row + row, scores[0], inverse);
      if (a.dropout.seed) {
        const uint64_t bits = kept<E, kKeyTiles>(a, seed, batch, head + h, first_row + row);
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
          for (int w = 0; w < 4; ++w) scores[0][t][w] *= multiplier(a, bits, t, w);
        }
      }
      for (int column = 0; column < a.head_dim; column += 64) {
        float sums[1][8][4] = {};
        multiply_held<Math>(sums[0], scores[0], values + h * a.head_dim + column, keys_pitch, kKeyTiles);
        each_pair(sums, row, column, [&](int r, int d, float left, float right) {
          const float by = r - row >= 8 ? inverse[1] : inverse[0];
          if (r >= rows || d >= a.head_dim) return;
          store_pair(a.attended + (first + r) * attended + (head + h) * a.head_dim + d, left * by, right * by);
        });
      }
    }
    __syncthreads();  // the next round overwrites q, k, v
  }
  meet();

  for (int column = worker * kOutColumns; column < a.out_dim; column += a.workers * kOutColumns) {
    typename Out::FeedA from_attended;
    typename Out::FeedB from_weight;
    const E* const at = a.attended + first * attended;
    from_attended.begin_rows(at, [&](int r) { return r < rows ? at + int64_t(r) * attended : nullptr; });
    from_weight.begin_rows(a.out_weight, [&](int n) {
      return column + n < a.out_dim ? a.out_weight + int64_t(column + n) * attended : nullptr;
    });
    float sums[kRows == 64 ? 2 : 1][kRows == 16 ? 1 : 2][4] = {};
    Out::run(sums, from_attended, from_weight, ring, attended);
    each_pair(sums, Out::row(), column + Out::column(), [&](int row, int n, float left, float right) {
      if (row >= rows || n >= a.out_dim) return;
      if (a.out_bias) left += to_float(a.out_bias[n]), right += to_float(a.out_bias[n + 1]);
      store_pair(a.out + (first + row) * a.out_dim + n, left, right);
    });
  }
#endif
}

// ---- launcher ----

constexpr int kLongest = 128;  // sequence

// How a layer is laid over blocks.
struct ForwardPlan {
  int rows, key_tiles;  // the kernel
  int tiles, workers, heads_each;
};

inline ForwardPlan forward_plan(const fuseline_small_layer& layer) {
  ForwardPlan plan{};
  const int S = int(layer.seqlen), H = int(layer.num_heads), D = int(layer.head_dim);
  plan.rows = S <= 16 ? 16 : S <= 32 ? 32 : 64;
  plan.tiles = int(divide_up(S, plan.rows));
  plan.key_tiles = plan.rows / 8 * plan.tiles;
  plan.heads_each = layer.shared_projection ? 1 : std::max(1, std::min(H, 64 / D));
  while (H % plan.heads_each != 0) --plan.heads_each;
  constexpr int kLargest = 16;  // cluster, where the device allows it
  plan.workers = 1;
  while (plan.workers * 2 <= H / plan.heads_each && plan.workers * 2 * plan.tiles <= kLargest) plan.workers *= 2;
  return plan;
}

template <class Math, int kRows, int kKeyTiles>
int launch_forward(SmallLayer<typename Math::Element>& a, ForwardPlan plan, const Device& device, bool only_asking,
                   void* stream) {
  const auto kernel = small_layer_forward<Math, kRows, kKeyTiles>;
  const size_t shared = forward_shared<Math, kRows>(plan.heads_each, a.head_dim, plan.tiles);
  if (shared > size_t(device.shared_a_block)) return FUSELINE_UNSUPPORTED;
  if (only_asking) return 0;
  if (plan.workers * plan.tiles > kMaxCluster) {
    static thread_local bool allowed[64];
    if (device.index >= 64) return FUSELINE_UNSUPPORTED;
    if (!allowed[device.index]) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return int(error);
      allowed[device.index] = true;
    }
  }
  int count = 0;
  while (true) {
    const cudaError_t error = resident_clusters(kernel, device, kTileThreads, shared, plan.workers * plan.tiles, count);
    if (error != cudaSuccess) return int(error);
    if (count > 0 || plan.workers == 1) break;
    plan.workers /= 2;
  }
  if (count == 0) return FUSELINE_UNSUPPORTED;
  a.heads_each = plan.heads_each, a.workers = plan.workers, a.tiles = plan.tiles;
  const int cluster = plan.workers * plan.tiles;
  return launch(kernel, a, int64_t(a.batch) * cluster, dim3(kTileThreads), shared, cluster, stream);
}

template <class Math>
int run_forward(const fuseline_small_layer& layer, const Device& device, bool only_asking, void* stream) {
  auto a = small_layer_of<typename Math::Element>(layer);
  const ForwardPlan plan = forward_plan(layer);
  switch (plan.key_tiles) {
    case 2:
      return launch_forward<Math, 16, 2>(a, plan, device, only_asking, stream);
    case 4:
      return launch_forward<Math, 32, 4>(a, plan, device, only_asking, stream);
    case 8:
      return launch_forward<Math, 64, 8>(a, plan, device, only_asking, stream);
    default:
      return launch_forward<Math, 64, 16>(a, plan, device, only_asking, stream);
  }
}

}  // namespace fuseline
