// What the forward and the backward of the small attention layer share: its sizes as the kernels see them, and the
// probabilities of 16 queries of a head, in the registers of one warp.
#pragma once

#include "fuseline_small_layer.h"
#include "device/elementwise.cuh"
#include "device/launch.cuh"
#include "device/philox.cuh"
#include "device/tile_product.cuh"
#include "plans/small_layer.h"

namespace fuseline {

using namespace small_layer;

static_assert(kBlock == kTileThreads && kLineBytes == kStepBytes);

template <class E>
struct SmallLayer {
  const E *x, *qkv_weight, *qkv_bias, *out_weight, *out_bias;
  const unsigned char* mask;
  int64_t mask_strides[4];
  E *qkv, *attended, *out;
  Dropout dropout;
  float scale;
  int batch, seqlen, embed_dim, heads, kv_heads, head_dim, out_dim;
  int projected;   // columns of qkv: (heads + 2 kv_heads) head_dim
  int heads_each;  // heads that a block has at a time
  int workers;     // blocks of a cluster, which share the heads
  int rounds;      // of heads that a block takes
  Divisor by_head_dim, by_group, by_workers;  // group: query heads that see the same keys
  bool mask_hides, causal, shared;

  // Row of qkv_weight, and column of qkv, of column n of the heads that begin at `head`: theirs of q, of k, of v.
  __device__ __forceinline__ int weight_row(int head, int n) const {
    const int width = heads_each * head_dim, part = (n >= width) + (n >= 2 * width), within = n - part * width;
    if (shared) return part * head_dim + within;
    const int own = int(by_head_dim.divide(uint32_t(within))), h = head + own, d = within - own * head_dim;
    if (part == 0) return h * head_dim + d;
    return (heads + (part - 1) * kv_heads + int(by_group.divide(uint32_t(h)))) * head_dim + d;
  }
  // Where row m of qkv begins, for the heads that begin at `head`, so that weight_row is a column of it.
  __device__ __forceinline__ int64_t qkv_row(int64_t m, int head) const {
    return m * projected + (shared ? head * 3 * head_dim : 0);
  }
};

template <class E>
SmallLayer<E> small_layer_of(const fuseline_small_layer& layer) {
  SmallLayer<E> a{};
  a.x = static_cast<const E*>(layer.x);
  a.qkv_weight = static_cast<const E*>(layer.qkv_weight);
  a.qkv_bias = static_cast<const E*>(layer.qkv_bias);
  a.out_weight = static_cast<const E*>(layer.out_weight);
  a.out_bias = static_cast<const E*>(layer.out_bias);
  a.mask = layer.mask;
  std::copy_n(layer.mask_strides, 4, a.mask_strides);
  a.qkv = static_cast<E*>(layer.qkv);
  a.attended = static_cast<E*>(layer.attended);
  a.out = static_cast<E*>(layer.out);
  a.dropout = dropout_of(layer.seed, layer.dropout);
  a.scale = float(layer.softmax_scale);
  a.batch = int(layer.batch), a.seqlen = int(layer.seqlen), a.embed_dim = int(layer.embed_dim);
  a.heads = int(layer.num_heads), a.kv_heads = int(layer.num_kv_heads), a.head_dim = int(layer.head_dim);
  a.out_dim = int(layer.out_dim);
  a.projected = (a.heads + 2 * a.kv_heads) * a.head_dim;
  a.by_head_dim = Divisor(uint32_t(a.head_dim)), a.by_group = Divisor(uint32_t(a.heads / a.kv_heads));
  a.heads_each = 1, a.workers = 1, a.rounds = 1;
  a.mask_hides = layer.mask_hides != 0, a.causal = layer.causal != 0, a.shared = layer.shared_projection != 0;
  return a;
}

// Launches what a plan says, `grid` of its blocks.
template <class Arguments>
int launch_of(void (*kernel)(Arguments), const Arguments& arguments, dim3 grid, const LaunchShape& shape, const Device& device,
              void* stream) {
  int count = 0;
  const cudaError_t error = resident_clusters(kernel, device, shape.threads, shape.shared, shape.cluster, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  return launch_overlapping(kernel, arguments, grid, shape.threads, shape.shared, shape.cluster, stream);
}

// Calls run(Math{}) with the arithmetic of a layer that has a plan.
template <class Run>
int with_math(const fuseline_small_layer& layer, const Run& run) {
  if (layer.dtype == FUSELINE_BFLOAT16) return run(Sixteen<__nv_bfloat16>{});
  return layer.tf32 ? run(Tf32{}) : run(Exact{});
}

__device__ __forceinline__ float over_quad(float value, bool largest) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, value, step);
    value = largest ? fmaxf(value, other) : value + other;
  }
  return value;
}

// The lowest 4 * count bits.
__device__ __forceinline__ uint64_t nibbles(int count) {
  return count >= 16 ? ~uint64_t(0) : count <= 0 ? 0 : (uint64_t(1) << (4 * count)) - 1;
}

// What of 16 queries' scores with the keys from `first_key` on is seen: bit 4 t + w is place w of key tile t. The loops
// over masks, here and below, are not unrolled: a kernel that runs for microseconds waits for each instruction that it
// executes once.
template <class E, int kTiles>
__device__ __forceinline__ uint64_t visible(const SmallLayer<E>& a, int batch, int head, int query, int first_key) {
  static_assert(kTiles <= 16);
  const int lane = threadIdx.x % kWarp, row = query + lane / 4, first = first_key + lane % 4 * 2;
  uint64_t bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int limit = (a.causal ? min(a.seqlen, row + 8 * half + 1) : a.seqlen) - first;  // tile t's first key: 8 t < limit
    bits |= nibbles((limit + 7) >> 3) & uint64_t(0x1111111111111111) << (2 * half);
    bits |= nibbles((limit + 6) >> 3) & uint64_t(0x2222222222222222) << (2 * half);
  }
  if (a.mask == nullptr) return bits;
  const unsigned char* const mask = a.mask + batch * a.mask_strides[0] + head * a.mask_strides[1];
#pragma unroll 1
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = row + w / 2 * 8, key = 8 * t + first + w % 2;
      if (at >= a.seqlen || key >= a.seqlen) continue;
      const bool set = mask[at * a.mask_strides[2] + key * a.mask_strides[3]] != 0;
      if (set == a.mask_hides) bits &= ~(uint64_t(1) << (4 * t + w));
    }
  }
  return bits;
}

// Scores with the keys from `first_key` on to e^(scaled score - its row's largest here), 0 where a key is hidden; the largest
// (-infinity where all is hidden) and the sums are those of rows lane / 4 and lane / 4 + 8. `query` is that of the warp's
// first row.
template <class E, int kTiles>
__device__ __forceinline__ void exponentials(const SmallLayer<E>& a, int batch, int head, int query, int first_key,
                                             float (&scores)[kTiles][4], float (&largest)[2], float (&sum)[2]) {
  const uint64_t bits = visible<E, kTiles>(a, batch, head, query, first_key);
  largest[0] = largest[1] = -kInfinity;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      scores[t][w] = bits >> (4 * t + w) & 1 ? scores[t][w] * a.scale : -kInfinity;
      largest[w / 2] = fmaxf(largest[w / 2], scores[t][w]);
    }
  }
  float from[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = over_quad(largest[half], true), sum[half] = 0.f;
    from[half] = largest[half] == -kInfinity ? 0.f : largest[half];  // e^-inf, not e^(inf - inf)
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      scores[t][w] = exponential<E>(scores[t][w] - from[w / 2]);
      sum[w / 2] += scores[t][w];
    }
  }
  sum[0] = over_quad(sum[0], false), sum[1] = over_quad(sum[1], false);
}

// The same with all keys; `inverse` gets 1 / the sum, or 0 where all is hidden.
template <class E, int kTiles>
__device__ __forceinline__ void exponentials(const SmallLayer<E>& a, int batch, int head, int query,
                                             float (&scores)[kTiles][4], float (&inverse)[2]) {
  float largest[2], sum[2];
  exponentials(a, batch, head, query, 0, scores, largest, sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) inverse[half] = sum[half] > 0.f ? 1.f / sum[half] : 0.f;
}

// Which of 16 queries' probabilities dropout keeps, bits as above.
template <class E, int kTiles>
__device__ __forceinline__ uint64_t kept(const SmallLayer<E>& a, uint64_t seed, int batch, int head, int query,
                                         int first_key = 0) {
  static_assert(kTiles <= 16);
  const int lane = threadIdx.x % kWarp;
  const int64_t above = (int64_t(batch) * a.heads + head) * a.seqlen;
  uint64_t bits = 0;
#pragma unroll 1
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int row = query + lane / 4 + w / 2 * 8, key = first_key + 8 * t + lane % 4 * 2 + w % 2;
      const bool keeps = dropout_multiplier(a.dropout, seed, (above + row) * a.seqlen + key) != 0.f;
      bits |= uint64_t(keeps) << (4 * t + w);
    }
  }
  return bits;
}

// The multiplier of place w of key tile t.
template <class E>
__device__ __forceinline__ float multiplier(const SmallLayer<E>& a, uint64_t bits, int t, int w) {
  return bits >> (4 * t + w) & 1 ? a.dropout.scale : 0.f;
}

}  // namespace fuseline
