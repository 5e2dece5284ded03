// The small attention layer, backward, in two launches; three where heads of queries share keys and values.
//
//   1. A block has a head of a batch element: the gradient of what the head attended to (grad_out times its columns of the
//      output projection), probabilities computed again from the q and k that the forward kept, and from them the
//      gradients of q, k and v, all on chip.
//      Heads that share keys and values each make gradients of these, which a launch between sums up.
//   2. The products that remain, in tiles of 64 x 64, all in one grid: the gradients of x and of both weights; and the
//      biases' gradients, which are sums of columns.
//
// Does: twice the operations of the forward, and the scores once more. Limit: tensor cores, at small sizes the latency of
// the longest chain (1,536 of k for grad_x at E = 512).

#include "device/overlap.cuh"
#include "small_layer.cuh"

namespace fuseline {

template <class Math, int kRows>
using HeadProduct = TileProduct<Math, Order::rows, Order::across, kRows, kHeadColumns, kRows >= 64 ? 2 : 1,
                                kRows == 16 ? 1 : kRows == 64 ? 2 : 4, head_stages(kRows)>;

template <class E>
struct SmallLayerHeads {
  SmallLayer<E> layer;
  const E* grad_out;
  E* grad_qkv;
  E* grad_kv;  // [tokens, 2, heads, D] where heads share keys and values, else null
};

template <class Math, int kRows>
__global__ void __launch_bounds__(kTileThreads, 1)
    small_layer_heads_backward(const __grid_constant__ SmallLayerHeads<typename Math::Element> of) {
#if __CUDA_ARCH__ >= 900
  using E = typename Math::Element;
  using Product = HeadProduct<Math, kRows>;
  constexpr int kKeyTiles = kRows / 8, kSize = 16 / int(sizeof(E));
  constexpr int kTall = kRows >= 64 ? 2 : 1, kWide = kRows == 16 ? 1 : kRows == 64 ? 2 : 4;
  extern __shared__ __align__(16) unsigned char shared[];

  const SmallLayer<E>& a = of.layer;
  const int batch = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
  const int S = a.seqlen, D = a.head_dim, pitch = padded<E>((D + 15) / 16 * 16);
  const int64_t first = int64_t(batch) * S;
  E* const q = reinterpret_cast<E*>(shared);
  E* const k = q + kRows * pitch;
  E* const v = k + kRows * pitch;
  E* const grad = v + kRows * pitch;
  E* const scratch = grad + kRows * pitch;  // the ring, then scores
  constexpr int kScoresPitch = kRows + 8;
  const int warp = threadIdx.x / kWarp;
  // Of qkv and its gradient: where this head's part of q, k or v begins in the first row.
  const auto begin_of = [&](int part) { return a.qkv_row(first, head) + a.weight_row(head, part * D); };

  const int pieces = D / kSize;
  wait_for_earlier();
  let_next_start();
  for (int piece = threadIdx.x; piece < kRows * pieces; piece += kTileThreads) {
    const int row = piece / pieces, at = (piece - row * pieces) * kSize;
    const bool wanted = row < S;
    const E* const from = a.qkv + (wanted ? int64_t(row) * a.projected : 0) + at;
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      copy_async<16>(q + (part * kRows + row) * pitch + at, from + begin_of(part), wanted);
    }
  }
  commit_copies();

  for (int column = 0; column < D; column += kHeadColumns) {
    typename Product::FeedA from_grad;
    typename Product::FeedB from_weight;
    const E* const at = of.grad_out + first * a.out_dim;
    from_grad.begin_rows(at, [&](int r) { return r < S ? at + int64_t(r) * a.out_dim : nullptr; });
    from_weight.begin_across(a.out_weight + head * D, int64_t(a.heads) * D, column, D);
    float sums[kTall][kWide][4] = {};
    Product::run(sums, from_grad, from_weight, scratch, a.out_dim);
    each_pair(sums, Product::row(), column + Product::column(), [&](int row, int d, float left, float right) {
      if (d < D) store_pair(grad + row * pitch + d, left, right);
    });
  }
  __syncthreads();

  const int query = warp * 16;
  const bool active = query < S && query < kRows;
  float dropped[1][kKeyTiles][4] = {};  // scores, then probabilities as they multiplied v
  float slopes[1][kKeyTiles][4] = {};   // gradients of the probabilities, then of the scores
  const auto write_scores = [&](const float (&from)[1][kKeyTiles][4]) {
    each_pair(from, query, 0, [&](int row, int key, float left, float right) {
      store_pair(scratch + row * kScoresPitch + key, left, right);
    });
  };
  if (active) {
    multiply<Math, Order::rows, Order::rows>(dropped, q + query * pitch, pitch, k, pitch, D / Math::kUnit);
    float inverse[2];
    exponentials(a, batch, head, query, dropped[0], inverse);
    multiply<Math, Order::rows, Order::rows>(slopes, grad + query * pitch, pitch, v, pitch, D / Math::kUnit);
    uint64_t bits = ~uint64_t(0);
    if (a.dropout.seed) bits = kept<E, kKeyTiles>(a, uint64_t(*a.dropout.seed), batch, head, query);
    const float scale = a.dropout.seed ? a.dropout.scale : 1.f;
    float delta[2] = {0.f, 0.f};
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        dropped[0][t][w] *= inverse[w / 2];
        slopes[0][t][w] *= bits >> (4 * t + w) & 1 ? scale : 0.f;
        delta[w / 2] = fmaf(dropped[0][t][w], slopes[0][t][w], delta[w / 2]);
      }
    }
    delta[0] = over_quad(delta[0], false), delta[1] = over_quad(delta[1], false);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        slopes[0][t][w] = dropped[0][t][w] * (slopes[0][t][w] - delta[w / 2]);
        dropped[0][t][w] *= bits >> (4 * t + w) & 1 ? scale : 0.f;
      }
    }
    write_scores(dropped);
  }
  __syncthreads();

  const int units = (S + Math::kUnit - 1) / Math::kUnit;
  const auto put = [&](const float (&sums)[kTall][kWide][4], int part, int column, float by) {
    const bool apart = part > 0 && of.grad_kv != nullptr;
    E* const to = apart ? of.grad_kv + ((first * 2 + part - 1) * a.heads + head) * D : of.grad_qkv + begin_of(part);
    const int line = apart ? 2 * a.heads * D : a.projected;
    each_pair(sums, Product::row(), column + Product::column(), [&](int row, int d, float left, float right) {
      if (row >= S || d >= D) return;
      store_pair(to + int64_t(row) * line + d, left * by, right * by);
    });
  };
  for (int column = 0; column < D; column += kHeadColumns) {
    float sums[kTall][kWide][4] = {};
    multiply<Math, Order::across, Order::across>(sums, scratch + Product::row(), kScoresPitch,
                                                 grad + column + Product::column(), pitch, units);
    put(sums, 2, column, 1.f);
  }
  __syncthreads();
  if (active) write_scores(slopes);
  __syncthreads();
  for (int column = 0; column < D; column += kHeadColumns) {
    float sums[kTall][kWide][4] = {};
    multiply<Math, Order::across, Order::across>(sums, scratch + Product::row(), kScoresPitch,
                                                 q + column + Product::column(), pitch, units);
    put(sums, 1, column, a.scale);
  }
  for (int column = 0; column < D; column += kHeadColumns) {
    float sums[kTall][kWide][4] = {};
    multiply<Math, Order::rows, Order::across>(sums, scratch + Product::row() * kScoresPitch, kScoresPitch,
                                               k + column + Product::column(), pitch, units);
    put(sums, 0, column, a.scale);
  }
#endif
}

// ---- keys and values that heads share ----

// A thread has 16 bytes of the gradient of a key or a value, the sum over the heads that see it.
template <class E>
__global__ void __launch_bounds__(kTileThreads) small_layer_sum_heads(const __grid_constant__ SmallLayerHeads<E> of) {
  constexpr int kSize = 16 / int(sizeof(E));
  const SmallLayer<E>& a = of.layer;
  const int pieces = a.head_dim / kSize, group = a.heads / a.kv_heads;
  const int64_t vector = int64_t(blockIdx.x) * kTileThreads + threadIdx.x;
  wait_for_earlier();
  let_next_start();
  if (vector >= int64_t(a.batch) * a.seqlen * 2 * a.kv_heads * pieces) return;
  const int piece = int(vector % pieces);
  const int64_t key = vector / pieces;  // of [tokens, 2, kv_heads]
  const E* const from = of.grad_kv + key * group * a.head_dim + piece * kSize;
  float sums[kSize] = {};
  for (int h = 0; h < group; ++h) {
    float values[kSize];
    unpack<E>(*reinterpret_cast<const uint4*>(from + h * a.head_dim), values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] += values[i];
  }
  const int64_t token = key / (2 * a.kv_heads), at = key % (2 * a.kv_heads);
  E* const to = of.grad_qkv + token * a.projected + (a.heads + at) * a.head_dim + piece * kSize;
  *reinterpret_cast<uint4*>(to) = pack<E>(sums);
}

// ---- the products that remain ----

// C [rows, columns] = A B over `length`. A is [rows, length], or with `turned` [length, rows]; B is [length, columns].
template <class E>
struct Remaining {
  const E *a, *b;
  E* c;
  int rows, columns, length;
  bool turned;
  int first_block;  // of the grid, that works on this
};

// Sums of the columns of [rows, columns].
template <class E>
struct ColumnSums {
  const E* of;
  E* sums;
  int rows, columns;
  int first_block;
};

template <class E>
struct SmallLayerRemaining {
  Remaining<E> products[3];
  ColumnSums<E> biases[2];
  int blocks;
};

constexpr int kSumParts = kTileThreads / kSumColumns;

template <class Math, Order kA>
__device__ __forceinline__ void remaining_tile(const Remaining<typename Math::Element>& p, int tile,
                                               typename Math::Element* ring) {
  using E = typename Math::Element;
  using Product = TileProduct<Math, kA, Order::across, kSide, kSide, 2, 2, kRemainingStages>;
  static_assert(Product::kBytes == kRemainingBytes);
  const int across = (p.columns + kSide - 1) / kSide;
  const int row = tile / across * kSide, column = tile % across * kSide;
  typename Product::FeedA from_a;
  typename Product::FeedB from_b;
  if constexpr (kA == Order::rows) {
    from_a.begin_rows(p.a, [&](int r) { return row + r < p.rows ? p.a + int64_t(row + r) * p.length : nullptr; });
  } else {
    from_a.begin_across(p.a, p.rows, row, p.rows);
  }
  from_b.begin_across(p.b, p.columns, column, p.columns);
  wait_for_earlier();
  let_next_start();
  float sums[2][2][4] = {};
  Product::run(sums, from_a, from_b, ring, p.length);
  each_pair(sums, row + Product::row(), column + Product::column(), [&](int r, int n, float left, float right) {
    if (r < p.rows && n < p.columns) store_pair(p.c + int64_t(r) * p.columns + n, left, right);
  });
}

template <class Math>
__global__ void __launch_bounds__(kTileThreads)
    small_layer_remaining(const __grid_constant__ SmallLayerRemaining<typename Math::Element> of) {
#if __CUDA_ARCH__ >= 900
  using E = typename Math::Element;
  extern __shared__ __align__(16) unsigned char shared[];
  E* const ring = reinterpret_cast<E*>(shared);
  const int block = blockIdx.x;
  for (int b = 0; b < 2; ++b) {
    const ColumnSums<E>& bias = of.biases[b];
    const int mine = block - bias.first_block;
    if (mine < 0 || mine * kSumColumns >= bias.columns) continue;
    float* const parts = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % kSumColumns, part = threadIdx.x / kSumColumns, column = mine * kSumColumns + lane;
    float sum = 0.f;
    wait_for_earlier();
    let_next_start();
    if (column < bias.columns) {
#pragma unroll 8
      for (int row = part; row < bias.rows; row += kSumParts) sum += to_float(bias.of[int64_t(row) * bias.columns + column]);
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && column < bias.columns) {
      for (int other = 1; other < kSumParts; ++other) sum += parts[other * kSumColumns + lane];
      bias.sums[column] = from_float<E>(sum);
    }
    return;
  }
  int which = 0;
  while (which < 2 && block >= of.products[which + 1].first_block) ++which;
  const Remaining<E>& product = of.products[which];
  if (product.turned) {
    remaining_tile<Math, Order::across>(product, block - product.first_block, ring);
  } else {
    remaining_tile<Math, Order::rows>(product, block - product.first_block, ring);
  }
#endif
}

// ---- launchers ----

template <class Math, int kRows>
int launch_heads_backward(const SmallLayerHeads<typename Math::Element>& of, const LaunchShape& shape, const Device& device,
                          void* stream) {
  static_assert(HeadProduct<Math, kRows>::kBytes == ring_bytes(head_stages(kRows), kRows, kHeadColumns));
  return launch_of(small_layer_heads_backward<Math, kRows>, of, dim3(unsigned(shape.grid)), shape, device, stream);
}

template <class Math>
int launch_heads_backward(const SmallLayerHeads<typename Math::Element>& of, const SmallLayerLaunch& by, const Device& device,
                          void* stream) {
  if (by.tiles.rows == 16) return launch_heads_backward<Math, 16>(of, by.shape, device, stream);
  if constexpr (!std::is_same_v<Math, Exact>) {
    if (by.tiles.rows == 128) return launch_heads_backward<Math, 128>(of, by.shape, device, stream);
  }
  return launch_heads_backward<Math, 64>(of, by.shape, device, stream);
}

template <class Math>
int launch_remaining(const SmallLayer<typename Math::Element>& a, const fuseline_small_layer_gradients& g,
                     const SmallLayerPlan& plan, const LaunchShape& shape, const Device& device, void* stream) {
  using E = typename Math::Element;
  const int tokens = a.batch * a.seqlen, attended = a.heads * a.head_dim;
  // A projection that the heads share sees a token of D elements for each head of a token.
  const int seen = a.shared ? tokens * a.heads : tokens, in = a.shared ? a.head_dim : a.embed_dim;
  const int projected = a.shared ? 3 * a.head_dim : a.projected;
  const E* const grad_out = static_cast<const E*>(g.grad_out);
  E* const grad_qkv = static_cast<E*>(g.grad_qkv);
  const auto to = [](void* result) { return static_cast<E*>(result); };
  int first[5] = {};
  for (int i = 1; i < 5; ++i) first[i] = first[i - 1] + plan.remaining[i - 1];
  const SmallLayerRemaining<E> of{
      {{grad_qkv, a.qkv_weight, to(g.grad_x), seen, in, projected, false, first[0]},
       {grad_qkv, a.x, to(g.grad_qkv_weight), projected, in, seen, true, first[1]},
       {grad_out, a.attended, to(g.grad_out_weight), a.out_dim, attended, tokens, true, first[2]}},
      {{grad_qkv, to(g.grad_qkv_bias), seen, g.grad_qkv_bias ? projected : 0, first[3]},
       {grad_out, to(g.grad_out_bias), tokens, g.grad_out_bias ? a.out_dim : 0, first[4]}}};
  return launch_of(small_layer_remaining<Math>, of, dim3(unsigned(shape.grid)), shape, device, stream);
}

template <class Math>
int launch_backward(const fuseline_small_layer& layer, const fuseline_small_layer_gradients& g, const SmallLayerPlan& plan,
                    const Device& device, void* stream) {
  using E = typename Math::Element;
  const bool grouped = layer.num_heads != layer.num_kv_heads;
  const SmallLayerHeads<E> of{small_layer_of<E>(layer), static_cast<const E*>(g.grad_out), static_cast<E*>(g.grad_qkv),
                              grouped ? static_cast<E*>(g.grad_kv) : nullptr};
  int code = 0;
  for (const SmallLayerLaunch& by : plan) {
    if (code != 0) return code;
    const LaunchShape& shape = by.shape;
    if (by.kernel == SmallLayerKernel::heads_backward) {
      code = launch_heads_backward<Math>(of, by, device, stream);
    } else if (by.kernel == SmallLayerKernel::sum_heads) {
      code = launch_of(small_layer_sum_heads<E>, of, dim3(unsigned(shape.grid)), shape, device, stream);
    } else {
      code = launch_remaining<Math>(of.layer, g, plan, shape, device, stream);
    }
  }
  return code;
}

}  // namespace fuseline

int fuseline_small_layer_backward(const fuseline_small_layer* layer, const fuseline_small_layer_gradients* gradients,
                                  void* stream) {
  using namespace fuseline;
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const SmallLayerPlan plan = plan_small_layer_backward(*layer, *gradients, device);
  if (plan.count == 0) return plan.code;
  return with_math(*layer, [&](auto math) { return launch_backward<decltype(math)>(*layer, *gradients, plan, device, stream); });
}
