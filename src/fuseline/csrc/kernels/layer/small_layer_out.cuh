// The small attention layer, forward, second launch: the output projection, in tiles for all multiprocessors.
//
// It begins while the heads are attended to (small_layer_heads.cuh) and fetches its weights meanwhile; what was attended to
// it fetches when that kernel has ended: so tiles are of few rows where there is room for the weights beforehand.
#pragma once

#include "device/chunk_product.cuh"
#include "device/overlap.cuh"
#include "device/tensor_map.h"
#include "small_layer.cuh"

namespace fuseline {

template <class E>
struct SmallLayerOut {
  CUtensorMap attended, weight;
  const E* bias;
  E* out;
  int tokens, out_dim;
  OutLayout layout;
};

template <class Product>
__global__ void __launch_bounds__(kTileThreads, 1)
    small_layer_out(const __grid_constant__ SmallLayerOut<typename Product::Element> of) {
#if __CUDA_ARCH__ >= 900
  using E = typename Product::Element;
  constexpr int kRows = Product::kRows, kColumns = Product::kColumns;
  extern __shared__ __align__(1024) unsigned char memory[];

  const int row = blockIdx.y * kRows, column = blockIdx.x * kColumns;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + of.layout.barriers);
  float* const biases = reinterpret_cast<float*>(barriers + 2 * kMostChunks);
  const ChunkRing ring{shared_address(memory), barriers, barriers + kMostChunks, of.layout.stages, of.layout.chunks};
  if (threadIdx.x == kTileThreads - 1) fetch_tensor_map(&of.weight), fetch_tensor_map(&of.attended);
  Product::begin(ring);
  __syncthreads();
  const auto fetch_weight = [&](int chunk, int stage) {
    barrier_expect(ring.full + stage, Product::kStage);
    copy_box(ring.stages_at + stage * Product::kStage + kRows * kChunkBytes, &of.weight, ring.full + stage,
             chunk * (kChunkBytes / int(sizeof(E))), column, 0);
  };
  const auto fetch_attended = [&](int chunk, int stage) {
    copy_box(ring.stages_at + stage * Product::kStage, &of.attended, ring.full + stage,
             chunk * (kChunkBytes / int(sizeof(E))), row, 0);
  };
  Product::fetch_first(ring, fetch_weight);
  if (threadIdx.x < kColumns) {
    const int n = column + threadIdx.x;
    biases[threadIdx.x] = of.bias && n < of.out_dim ? to_float(of.bias[n]) : 0.f;
  }
  wait_for_earlier();
  let_next_start();
  Product::fetch_first(ring, fetch_attended);

  typename Product::Sums sums;
  Product::run(sums, ring, [&](int chunk, int stage) { fetch_weight(chunk, stage), fetch_attended(chunk, stage); });
  __syncthreads();
  float* const staging = reinterpret_cast<float*>(memory);
  Product::put(staging, sums);
  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < kRows * kColumns / 8; item += kTileThreads) {
    const int r = item / (kColumns / 8), n = item % (kColumns / 8) * 8;
    if (row + r >= of.tokens || column + n >= of.out_dim) continue;
    float values[8];
    Product::take(staging, r, n, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += biases[n + i];
    uint4 vectors[sizeof(E) / 2];
    pack_eight<E>(values, vectors);
    uint4* const to = reinterpret_cast<uint4*>(of.out + int64_t(row + r) * of.out_dim + column + n);
#pragma unroll
    for (int v = 0; v < int(sizeof(E) / 2); ++v) to[v] = vectors[v];
  }
#endif
}

// ---- launcher ----

template <class Math, const ChunkTiles& kTiles>
using OutProduct = ChunkProduct<Math, kTiles.rows, kTiles.columns, kTiles.tall, kTiles.wide, kTiles.splits>;

template <class Product, const ChunkTiles& kTiles>
int launch_out(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  using E = typename Product::Element;
  static_assert(Product::kStage == kTiles.stage_bytes() && Product::kSumBytes == kTiles.sum_bytes());
  static_assert(kMostChunks == kMostRingStages);
  const LaunchShape& shape = plan.launches[1].shape;
  SmallLayerOut<E> of{};
  of.bias = static_cast<const E*>(layer.out_bias), of.out = static_cast<E*>(layer.out);
  of.tokens = int(tokens_of(layer)), of.out_dim = int(layer.out_dim), of.layout = plan.out;
  const int64_t k = layer.num_heads * layer.head_dim, line = k * int64_t(sizeof(E));
  constexpr bool kTf32 = std::is_same_v<typename Product::Arithmetic, Tf32>;
  int code = make_tensor_map(of.attended,
                             {layer.attended, k, of.tokens, 1, line, line * of.tokens, kTiles.rows, layer.dtype, kTf32});
  if (code != 0) return code;
  code = make_tensor_map(of.weight, {layer.out_weight, k, of.out_dim, 1, line, line * of.out_dim, kTiles.columns, layer.dtype,
                                     kTf32});
  if (code != 0) return code;
  const unsigned across = unsigned(divide_up(of.out_dim, kTiles.columns));
  return launch_of(small_layer_out<Product>, of, dim3(across, unsigned(shape.grid) / across), shape, device, stream);
}

// By products of warps.
template <class Math>
int launch_out(const fuseline_small_layer& layer, const SmallLayerPlan& plan, const Device& device, void* stream) {
  const ChunkTiles& tiles = plan.launches[1].tiles;
  if constexpr (std::is_same_v<Math, Exact>) {
    if (tiles.rows == kOutLarge.rows) return launch_out<OutProduct<Math, kOutLarge>, kOutLarge>(layer, plan, device, stream);
    if (tiles.columns == kOutSquare.columns) {
      return launch_out<OutProduct<Math, kOutSquare>, kOutSquare>(layer, plan, device, stream);
    }
  } else {
    if (tiles.rows == kOutFlat.rows) return launch_out<OutProduct<Math, kOutFlat>, kOutFlat>(layer, plan, device, stream);
  }
  return launch_out<OutProduct<Math, kOutSmall>, kOutSmall>(layer, plan, device, stream);
}

}  // namespace fuseline
