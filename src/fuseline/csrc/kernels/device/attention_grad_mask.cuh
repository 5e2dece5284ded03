// The gradient of an additive mask: dy (attention_backward.cuh), summed over the dimensions that the mask is broadcast over.
//
// A block has a tile of 64 rows and 64 keys of one head of the gradient and goes through all scores that were added to it, in
// one order: batches, heads, tiles of rows, tiles of keys, as far as the mask has one entry for all of them. Where that leaves
// too few blocks the way is cut into pieces, whose sums a second kernel adds up. 4 * T * S * D operations a head. Limit:
// bringing q, grad_out, k and v from L2 (45 KB a million operations).
#pragma once

#include "attention_backward.cuh"

namespace fuseline {

template <class T, int kD>
struct GradMaskTiles {
  static constexpr AttentionTiles kSizes = grad_mask_tiles(sizeof(T), kD);
  static constexpr int kM = kSizes.m, kRows = kSizes.held(), kRowWarps = kRows / (16 * kM), kKeyWarps = 1;  // and keys
  static constexpr int kThreads = kSizes.threads(), kStages = kSizes.stages, kShared = kSizes.shared;
  static constexpr int kWarpKeys = kRows / kKeyWarps, kKeysAtOnce = kWarpKeys;
  static constexpr int kN = kKeysAtOnce / 8, kParts = kWarpKeys / kKeysAtOnce;
  static constexpr int kTile = kRows * kPitch<T, kD> * int(sizeof(T));
  static constexpr int kBlocks = 2;           // of a multiprocessor
  static constexpr int kPartsAhead = 1;       // whose products are under way at a time
  using Order = KeyColumns<kKeysAtOnce / 8>;

  template <class Slots>
  static __device__ __forceinline__ void copy(unsigned char* to, const T* from, int64_t stride, int rows, int head_dim) {
    copy_tile<T, kRows, kD, kThreads, Slots>(reinterpret_cast<T*>(to), from, stride, rows, head_dim);
  }
  static __device__ __forceinline__ void show() {}
  // Starts scores = q k^T and dots = grad_out v^T of a stage's rows from `row` on, of the warp, and its keys from `key` on.
  static __device__ __forceinline__ void start(float (&scores)[kM][kN][4], float (&dots)[kM][kN][4], const unsigned char* stage,
                                               int row, int key) {
    const T* const tiles = reinterpret_cast<const T*>(stage);
    constexpr int kNext = kTile / int(sizeof(T));
    multiply_rows<T, kD>(scores, tiles + row * kPitch<T, kD>, tiles + 2 * kNext + key * kPitch<T, kD>);
    multiply_rows<T, kD>(dots, tiles + kNext + row * kPitch<T, kD>, tiles + 3 * kNext + key * kPitch<T, kD>);
  }
  // They are there, but for those of the `kPending` parts started last.
  template <int kPending>
  static __device__ __forceinline__ void finish(float (&)[kM][kN][4], float (&)[kM][kN][4]) {}
};

struct GradMaskTensors {
  AttentionBackward g;
  void* to;  // the gradient, or `pieces` of them in fp32
  int to_dtype;
  int64_t strides[4];
};
struct AttentionGradMask : GradMaskTensors, MaskGradientParts {};

// A block's way through the tiles of scores that its tile of the gradient is the sum of; those that see nothing are left out.
struct GradMaskWay {
  int key, row, head, batch;  // tiles of keys and rows, from the first that is summed
  int64_t left;               // tiles from here on, this one among them

  __device__ __forceinline__ GradMaskWay(const AttentionGradMask& of, int piece) {
    const int64_t count = int64_t(of.over_batches) * of.over_heads * of.over_rows * of.over_keys;
    int64_t rest = count * piece / of.pieces;
    left = count * (piece + 1) / of.pieces - rest;
    key = int(rest % of.over_keys), rest /= of.over_keys;
    row = int(rest % of.over_rows), rest /= of.over_rows;
    head = int(rest % of.over_heads), batch = int(rest / of.over_heads);
  }
  __device__ __forceinline__ void advance(const AttentionGradMask& of) {
    --left;
    if (++key < of.over_keys) return;
    key = 0;
    if (++row < of.over_rows) return;
    row = 0;
    if (++head < of.over_heads) return;
    head = 0, ++batch;
  }
};

// Of: GradMaskTiles, or GradMaskPanels of attention_grad_mask_wgmma.cuh.
template <class T, class Of>
__global__ void __launch_bounds__(Of::kThreads, Of::kBlocks)
    attention_grad_mask(const __grid_constant__ AttentionGradMask of, int) {
  constexpr int kMaskTile = Of::kRows, kThreads = Of::kThreads, kTile = Of::kTile, kM = Of::kM;
  constexpr int kN = Of::kN, kParts = Of::kParts;
  // Stages of q, grad_out, k, v; of the mask behind them, one if it stays.
  extern __shared__ __align__(1024) unsigned char memory[];
  const Attention& a = of.g.a;
  const fuseline_attention& c = a.call;
  const int lane = threadIdx.x % 32, head_dim = int(c.head_dim);
  const int warp_row = int(threadIdx.x) / 32 % Of::kRowWarps * 16 * kM;
  const int warp_key = int(threadIdx.x) / 32 / Of::kRowWarps * Of::kWarpKeys;
  unsigned block = blockIdx.x;
  const auto next = [&](int count) {
    const int index = int(block % unsigned(count));
    block /= unsigned(count);
    return index;
  };
  const int key_tile = next(of.key_tiles), row_tile = next(of.row_tiles), head0 = next(of.heads),
            batch0 = next(of.batches), piece = int(block);

  GradMaskWay way(of, piece);
  const auto first_row = [&](const GradMaskWay& at) { return (row_tile + at.row) * kMaskTile; };
  const auto first_key = [&](const GradMaskWay& at) { return (key_tile + at.key) * kMaskTile; };
  const auto leave_out_unseen = [&] {
    while (way.left > 0) {
      const Sequence sequence(c, batch0 + way.batch);
      const int row = first_row(way), key = first_key(way), last = min(row + kMaskTile, sequence.rows) - 1;
      if (row <= last && key < sequence.keys_to(a, last) && key + kMaskTile > sequence.keys_from(a, row)) return;
      way.advance(of);
    }
  };
  const auto mask_tile = [&](int stage) { return memory + Of::kShared + (of.mask_stays ? 0 : stage) * a.mask_tile.bytes; };
  const auto copy = [&](int stage, bool first) {
    if (way.left > 0) {
      const Sequence sequence(c, batch0 + way.batch);
      const int row = first_row(way), key = first_key(way), head = head0 + way.head, kv_head = head / a.group;
      unsigned char* const to = memory + stage * 4 * kTile;
      Of::template copy<InPlace>(
          to, static_cast<const T*>(c.q) + sequence.row_offset(c.q_strides, head, row), c.q_strides[2],
          sequence.rows - row, head_dim);
      Of::template copy<InPlace>(
          to + kTile, static_cast<const T*>(of.g.grad_out) + sequence.row_offset(of.g.grad_out_strides, head, row),
          of.g.grad_out_strides[2], sequence.rows - row, head_dim);
      Of::template copy<typename Of::Order>(
          to + 2 * kTile, static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, kv_head, key), c.k_strides[2],
          sequence.keys - key, head_dim);
      Of::template copy<typename Of::Order>(
          to + 3 * kTile, static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, kv_head, key), c.v_strides[2],
          sequence.keys - key, head_dim);
      if (first || !of.mask_stays) {
        copy_mask<T, kMaskTile, kMaskTile, kThreads>(mask_tile(stage), a, sequence, head, row, key);
      }
    }
    end_copies();
  };

  float sums[kParts][kM][kN][4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) set_zero(sums[part]);
  leave_out_unseen();
  copy(0, true);
  for (int stage = 0; way.left > 0; stage ^= Of::kStages - 1) {
    const GradMaskWay here = way;
    const Sequence sequence(c, batch0 + here.batch);
    const int row = first_row(here), key = first_key(here), head = head0 + here.head;
    float lse[kM][2], delta[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + warp_row + 16 * m + 8 * half + lane / 4;
        const int64_t statistic = sequence.statistic(of.g, head, at < sequence.rows ? at : row);
        lse[m][half] = at < sequence.rows ? of.g.lse_log2[statistic] : kInfinity;
        delta[m][half] = at < sequence.rows ? of.g.delta[statistic] : 0.f;
      }
    wait_copies<0>();
    Of::show();
    __syncthreads();
    way.advance(of);
    leave_out_unseen();
    if constexpr (Of::kStages == 2) copy(stage ^ 1, false);
    const unsigned char* const tiles = memory + stage * 4 * kTile;
    const int last = min(row + kMaskTile, sequence.rows) - 1;
    const bool whole = key >= sequence.keys_from(a, last) && key + kMaskTile <= sequence.keys_to(a, row);
    float all_scores[Of::kPartsAhead][kM][kN][4], all_dots[Of::kPartsAhead][kM][kN][4];
    const auto start = [&](int part) {
      const int ahead = part % Of::kPartsAhead;
      Of::start(all_scores[ahead], all_dots[ahead], tiles, warp_row, warp_key + part * Of::kKeysAtOnce);
    };
    if constexpr (Of::kPartsAhead > 1) start(0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int along = warp_key + part * Of::kKeysAtOnce;
      float(&scores)[kM][kN][4] = all_scores[part % Of::kPartsAhead];
      float(&dots)[kM][kN][4] = all_dots[part % Of::kPartsAhead];
      if constexpr (Of::kPartsAhead == 1) start(part);
      else if (part + 1 < kParts) start(part + 1);
      if (part + 1 < kParts) Of::template finish<Of::kPartsAhead - 1>(scores, dots);
      else Of::template finish<0>(scores, dots);
      const Place place{sequence, head, row + warp_row, key + along, mask_at(a, mask_tile(stage), warp_row, along)};
      differentiate<T, false, false, false>(
          a, place, whole, scores, dots, [&](int m, int, int e) { return lse[m][e / 2]; },
          [&](int m, int, int e) { return delta[m][e / 2]; });
      each_element<kM, kN>([&](int m, int n, int e) { sums[part][m][n][e] += dots[m][n][e]; });
    }
    if constexpr (Of::kStages == 1) {
      __syncthreads();
      copy(0, false);
    }
  }
  wait_copies<0>();

  // Through shared memory: sums over rows and keys, where the mask has one entry for all of them, and whole lines to write.
  constexpr int kLine = kMaskTile + 1;
  float* const tile = reinterpret_cast<float*>(memory);
  static_assert(kMaskTile * kLine * 4 <= Of::kShared);
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    each_element<kM, kN>([&](int m, int n, int e) {
      const int row = warp_row + 16 * m + 8 * (e / 2) + lane / 4;
      const int key = warp_key + part * Of::kKeysAtOnce + Of::Order::kRun * (lane % 4) + column_of<false, kN>(n, e % 2);
      tile[row * kLine + key] = sums[part][m][n][e];
    });
  }
  __syncthreads();
  const bool one_row = of.strides[2] == 0, one_key = of.strides[3] == 0;
  if (one_row && threadIdx.x < kMaskTile) {
    float sum = 0.f;
    for (int row = 0; row < kMaskTile; ++row) sum += tile[row * kLine + threadIdx.x];
    tile[threadIdx.x] = sum;
  }
  if (one_row) __syncthreads();
  const int rows = one_row ? 1 : kMaskTile;
  if (one_key && int(threadIdx.x) < rows) {
    float sum = 0.f;
    for (int key = 0; key < kMaskTile; ++key) sum += tile[threadIdx.x * kLine + key];
    tile[threadIdx.x * kLine] = sum;
  }
  if (one_key) __syncthreads();
  const int keys = one_key ? 1 : kMaskTile;
  const Sequence sequence(c, batch0);
  const int at_row = one_row ? 0 : sequence.first_row, at_key = one_key ? 0 : sequence.first_key;
  const int64_t out = piece * of.size + sequence.batch * of.strides[0] + head0 * of.strides[1];
  for (int at = threadIdx.x; at < rows * keys; at += kThreads) {
    const int row = one_key ? at : at / kMaskTile, key = one_key ? 0 : at % kMaskTile;
    const int64_t y = int64_t(row_tile) * kMaskTile + row, x = int64_t(key_tile) * kMaskTile + key;
    if ((one_row || y < sequence.rows) && (one_key || x < sequence.keys)) {
      store_as(of.to, of.to_dtype, out + (at_row + y) * of.strides[2] + (at_key + x) * of.strides[3],
               tile[row * kLine + key]);
    }
  }
}

// By products of warps, for heads of up to kD.
template <class T, int kD>
int launch_grad_mask_tiles(const AttentionGradMask& of, const AttentionLaunch& by, void* stream) {
  return launch_attention(attention_grad_mask<T, GradMaskTiles<T, kD>>, of, by, stream);
}

}  // namespace fuseline
