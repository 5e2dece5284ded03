// The arguments of the kernels of linear layers for few rows, and what these share.
#pragma once

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/overlap.cuh"
#include "device/quant_copies.cuh"
#include "quant_weights.cuh"

namespace fuseline {

constexpr int kPieceBytes = 1024;  // of the next launch's weights, that the L2 is asked for at once

struct LinearArguments {
  const char* x;
  const char* weight;
  const uint32_t* scales;  // int4: rows g and g + 8; else of one row
  const uint32_t* zeros;   // rows g, g + 8, g + 1, g + 9
  const char* bias;
  char* y;
  int64_t x_stride, weight_stride;  // bytes
  int m, n, k;
  int tiles, chunks;        // of n by 16 and of k by 64, rounded up
  int groups, group_shift;  // a group is 32 << group_shift columns
  int groups_a_slice;       // streams: that a block has scales of, at most
  int splits;                // blocks that share the columns
  int units, base, extra;    // streams: clusters; of each, units of tiles (of tiles: steps of a block), and how many have one more
  int steps, steps_a_split;  // of k, and of it that a block has: chunks, for int4 streams and tiles pairs of them
  int x_bytes, scale_bytes;  // of shared memory
  int prefetched;            // steps of a warp that the L2 is asked for at once; of tiles, behind those under way
  bool x_vectors;  // rows of x start at multiples of 16 bytes and are so many long
  bool overlap;    // weights may be read before earlier launches have ended
  int norm;        // a fuseline_linear_norm
  const char* norm_weight;
  const char* norm_bias;
  float eps;
  int activation;  // a fuseline_linear_activation
  int halves;      // SwiGLU: tiles from a gate's to the other's, 0 without
  const char* residual;
  const char* next_weight;  // what the next launch reads, or null
  int next_pieces;          // of it, kPieceBytes each
  char* workspace;  // tiles: x in order
  uint64_t* flags;  // tiles: `token` of each block that has left sums in `partials`
  uint64_t token;   // tiles: of this launch or graph node
  char* partials;
  bool ordered;  // tiles: x is in order in the workspace
  bool y_pairs;     // two outputs at a time
};

// The tile of W that stands at `place` among those of all blocks: gates and what they multiply take turns.
__device__ __forceinline__ int tile_at(const LinearArguments& a, int place) {
  return a.halves ? place / 2 + place % 2 * a.halves : place;
}

// Norms' weights on their way to the L2, out of which a model's weights have pushed them, while earlier launches end.
template <int kThreads>
__device__ __forceinline__ void prefetch_norm(const LinearArguments& a) {
  if (a.norm == FUSELINE_NORM_NONE) return;
  for (int at = int(threadIdx.x) * 128; at < a.k * 2; at += kThreads * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a.norm_weight + at));
    if (a.norm_bias) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.norm_bias + at));
  }
}

// Some of what the next launch reads on its way to the L2, a piece for each of a block's warps there, about where these
// begin: HBM would idle while this launch ends and that one's blocks start. More loses: a layer of Llama-2-7B in
// int8 takes 87.6 us where each launch asks for 12 KB a block, 88.4 for 24, 91.2 for 48.
__device__ __forceinline__ void prefetch_next(const LinearArguments& a) {
  constexpr int kPieces = 12;
  if (!a.next_weight || threadIdx.x >= kPieces) return;
  const int64_t piece = int64_t(blockIdx.x * kPieces + threadIdx.x) * max(1, a.next_pieces / int(gridDim.x * kPieces));
  if (piece < a.next_pieces) prefetch_to_l2(a.next_weight + piece * kPieceBytes, kPieceBytes);
}

// What stands after the product: one output, of `feature` and, for SwiGLU, the sum of what its gate multiplies.
template <class T>
__device__ __forceinline__ float activated(const LinearArguments& a, float sum, float other) {
  if (a.activation == FUSELINE_ACTIVATION_SWIGLU) return Silu<T>::value(sum) * other;
  if (a.activation == FUSELINE_ACTIVATION_GELU) return GeluErf<T>::value(sum);
  if (a.activation == FUSELINE_ACTIVATION_GELU_TANH) return GeluTanh<T>::value(sum);
  return sum;
}

}  // namespace fuseline
