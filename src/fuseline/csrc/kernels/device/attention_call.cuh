// One attention call as its kernels read it, and which keys a query row sees.
#pragma once

#include <climits>
#include <cmath>

#include "../plans/attention_tiles.h"
#include "philox.cuh"

namespace fuseline {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Attention {
  fuseline_attention call;
  int group;           // query heads of a key head
  int left, right;     // of the diagonal, both kept; kUnlimited: all
  float scale, scale_log2, inverse_scale, cap;  // scale_log2: times log2(e); cap 0: none
  MaskTile mask_tile;  // the plan's
  Dropout dropout;
};

// The same of a backward.
struct AttentionBackward {
  Attention a;
  const void* grad_out;
  void *grad_q, *grad_k, *grad_v;
  int64_t grad_out_strides[3], grad_q_strides[3], grad_k_strides[3], grad_v_strides[3];
  // [batch, heads, statistic_rows]; lse_log2 is lse times log2(e), and inf where the row sees nothing or is none.
  const float *delta, *lse_log2;
  int64_t statistic_rows;  // seqlen_q and what fills its last 64
};

// dy of some tiles of rows in 16 bits, as the kernel of rows (attention_backward_wgmma.cuh) leaves it on its way to grad_q:
// for [tile of rows][sequence][head][step of keys] 64 rows and the step's keys, vectors of eight keys as threads hold them.
struct LeftScores {
  uint4* at;
  int first_tile, tiles;  // of rows
  int steps;              // of all keys
};

// What the backward in one pass works with: sums that blocks add to in turn, and how many have. Of grad_q for tiles of 64 rows,
// [batch, heads, tiles]; of grad_k and grad_v for tiles of 128 keys, [batch, kv_heads, tiles], where heads share their keys.
struct SinglePassScratch {
  float *partial, *key_partial;
  int *turns, *key_turns;
  // What dropout keeps, [batch, heads, tiles of 64 rows, tiles of 128 keys, KeptBits::kWords]; null without dropout.
  uint32_t* kept;
};

inline Attention attention_of(const fuseline_attention& call) {
  Attention a{};
  a.call = call;
  a.group = int(call.heads / call.kv_heads);
  const auto limit = [](int64_t window) { return window < 0 || window > kUnlimited ? kUnlimited : int(window); };
  a.left = limit(call.window_left);
  a.right = call.causal == FUSELINE_CAUSAL_NONE ? limit(call.window_right) : 0;
  a.scale = float(call.softmax_scale), a.scale_log2 = float(call.softmax_scale * 1.4426950408889634);
  a.inverse_scale = float(1.0 / call.softmax_scale);
  a.cap = float(call.soft_cap);
  a.dropout = dropout_of(call.seed, call.dropout);
  return a;
}

// The sequence a block works on: batch b of a call, or a packed sequence.
struct Sequence {
  int64_t batch;               // for strides
  int first_row, first_key;    // within the tensors
  int rows, keys, shift;       // key t + shift is on the diagonal of row t

  // Number `index` of a call. Packed calls have one more, which sees nothing: the rows and keys behind the last.
  __device__ __forceinline__ Sequence(const fuseline_attention& c, int index) {
    if (c.cu_seqlens_q == nullptr) {
      batch = index, first_row = first_key = 0, rows = int(c.seqlen_q), keys = int(c.seqlen_k);
    } else {
      batch = 0, first_row = c.cu_seqlens_q[index], first_key = c.cu_seqlens_k[index];
      rows = c.cu_seqlens_q[index + 1] - first_row, keys = c.cu_seqlens_k[index + 1] - first_key;
    }
    shift = c.causal == FUSELINE_CAUSAL_BOTTOM_RIGHT ? keys - rows : 0;
  }

  __device__ __forceinline__ int64_t row_offset(const int64_t (&strides)[3], int head, int row) const {
    return batch * strides[0] + head * strides[1] + int64_t(first_row + row) * strides[2];
  }
  __device__ __forceinline__ int64_t key_offset(const int64_t (&strides)[3], int head, int key) const {
    return batch * strides[0] + head * strides[1] + int64_t(first_key + key) * strides[2];
  }
  // Of lse.
  __device__ __forceinline__ int64_t statistic(const fuseline_attention& c, int head, int row) const {
    return (batch * c.heads + head) * c.seqlen_q + first_row + row;
  }
  // Of delta and lse_log2.
  __device__ __forceinline__ int64_t statistic(const AttentionBackward& g, int head, int row) const {
    return (batch * g.a.call.heads + head) * g.statistic_rows + first_row + row;
  }
  // Of the dropout mask, at the sequence's first key.
  __device__ __forceinline__ int64_t random(const fuseline_attention& c, int head, int row) const {
    return statistic(c, head, row) * c.seqlen_k + first_key;
  }
  __device__ __forceinline__ int64_t mask(const fuseline_attention& c, int head, int row, int key) const {
    return batch * c.mask_strides[0] + head * c.mask_strides[1] + int64_t(first_row + row) * c.mask_strides[2] +
           int64_t(first_key + key) * c.mask_strides[3];
  }

  // The keys that rows first .. last see lie in [keys_from, keys_to), and all of them see those of [all_from, all_to).
  __device__ __forceinline__ int keys_from(const Attention& a, int first) const {
    return max(0, first + shift - a.left);
  }
  __device__ __forceinline__ int keys_to(const Attention& a, int last) const {
    return min(keys, last + shift + a.right + 1);
  }
  // The rows that see keys first .. last lie in [rows_from, rows_to).
  __device__ __forceinline__ int rows_from(const Attention& a, int first) const {
    return max(0, first - shift - a.right);
  }
  __device__ __forceinline__ int rows_to(const Attention& a, int last) const {
    return min(rows, last - shift + a.left + 1);
  }
};

// What a block works on. Blocks run over tiles of the longest sequence, then heads, then sequences; those that have the
// most to do should come first.
struct Task {
  int tile, head, sequence;
  __device__ __forceinline__ Task(int tiles, int heads, bool last_tiles_first) {
    // Computed anew wherever it is asked for: registers are dearer than a division outside of loops.
    unsigned block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    tile = int(block % unsigned(tiles)), block /= unsigned(tiles);
    head = int(block % unsigned(heads)), sequence = int(block / unsigned(heads));
    if (last_tiles_first) tile = tiles - 1 - tile;
  }
};

}  // namespace fuseline
