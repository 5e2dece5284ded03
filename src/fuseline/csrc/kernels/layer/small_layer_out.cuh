// The small attention layer, forward, second launch: the output projection, in tiles for all multiprocessors.
//
// It begins while the heads are attended to (small_layer_heads.cuh) and fetches its weights meanwhile; what was attended to
// it fetches when that kernel has ended: so tiles are of few rows where there is room for the weights beforehand.
#pragma once

#include "device/chunk_product.cuh"
#include "device/overlap.cuh"
#include "small_layer_wgmma.h"
#include "device/tensor_map.h"

namespace fuseline {

template <class E>
struct SmallLayerOut {
  CUtensorMap attended, weight;
  const E* bias;
  E* out;
  int tokens, out_dim;
  int stages, chunks;  // of k
  int barriers;        // where these begin in shared memory, bytes
};

template <class Product>
__global__ void __launch_bounds__(kTileThreads, 1)
    small_layer_out(const __grid_constant__ SmallLayerOut<typename Product::Element> of) {
#if __CUDA_ARCH__ >= 900
  using E = typename Product::Element;
  constexpr int kRows = Product::kRows, kColumns = Product::kColumns;
  extern __shared__ __align__(1024) unsigned char memory[];

  const int row = blockIdx.y * kRows, column = blockIdx.x * kColumns;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + of.barriers);
  float* const biases = reinterpret_cast<float*>(barriers + 2 * kMostChunks);
  const ChunkRing ring{shared_address(memory), barriers, barriers + kMostChunks, of.stages, of.chunks};
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

template <class Product>
int launch_out(const fuseline_small_layer& layer, const Device& device, void* stream) {
  using E = typename Product::Element;
  constexpr int kRows = Product::kRows, kColumns = Product::kColumns;
  SmallLayerOut<E> of{};
  of.bias = static_cast<const E*>(layer.out_bias), of.out = static_cast<E*>(layer.out);
  of.tokens = int(layer.batch * layer.seqlen), of.out_dim = int(layer.out_dim);
  const int64_t k = layer.num_heads * layer.head_dim, line = k * int64_t(sizeof(E));
  of.chunks = int(divide_up(line, kChunkBytes));
  constexpr int kBehind = kMostChunks * 16 + kColumns * 4;
  of.stages = Product::stages(of.chunks, device.shared_a_block - kBehind);
  if (of.stages < std::min(of.chunks, Product::kSplitsOfChunks)) return FUSELINE_UNSUPPORTED;
  of.barriers = std::max(of.stages * Product::kStage, Product::kSumBytes);
  const size_t bytes = size_t(of.barriers + kBehind);

  const auto kernel = small_layer_out<Product>;
  int count = 0;
  const cudaError_t error = resident_clusters(kernel, device, kTileThreads, bytes, 1, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  const dim3 grid(unsigned(divide_up(of.out_dim, kColumns)), unsigned(divide_up(of.tokens, kRows)));
  constexpr bool kTf32 = std::is_same_v<typename Product::Arithmetic, Tf32>;
  int code = make_tensor_map(of.attended,
                             {layer.attended, k, of.tokens, 1, line, line * of.tokens, kRows, layer.dtype, kTf32});
  if (code != 0) return code;
  code = make_tensor_map(of.weight, {layer.out_weight, k, of.out_dim, 1, line, line * of.out_dim, kColumns, layer.dtype,
                                     kTf32});
  if (code != 0) return code;
  return launch_overlapping(kernel, of, grid, kTileThreads, bytes, 1, stream);
}

// The largest tiles of which there are enough for most multiprocessors.
template <class Math>
int run_out(const fuseline_small_layer& layer, const Device& device, void* stream) {
  const auto enough = [&](int64_t rows, int64_t columns) {
    return divide_up(layer.batch * layer.seqlen, rows) * divide_up(layer.out_dim, columns) * 4 >= 3 * device.processors;
  };
  if constexpr (std::is_same_v<Math, Exact>) {  // for which shared memory is read too often with few rows
    if (enough(64, 64)) return launch_out<ChunkProduct<Math, 64, 64, 1, 4, 1>>(layer, device, stream);
    if (enough(32, 32)) return launch_out<ChunkProduct<Math, 32, 32, 1, 4, 4>>(layer, device, stream);
  } else {
    if (enough(64, 64) && device.warpgroups) return out_by_warpgroups<Math>(layer, device, stream);
    if (enough(16, 64)) return launch_out<ChunkProduct<Math, 16, 64, 1, 4, 4>>(layer, device, stream);
  }
  return launch_out<ChunkProduct<Math, 32, 16, 2, 2, 8>>(layer, device, stream);
}

}  // namespace fuseline
