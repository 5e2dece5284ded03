// One attention call as its kernels read it, and which keys a query row sees.
#pragma once

#include <climits>
#include <cmath>

#include "../fuseline_attention.h"
#include "philox.cuh"

namespace fuseline {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Tiles of the mask in shared memory.
struct MaskTile {
  bool in_vectors;         // its rows can be copied in 16 bytes
  int size, pitch, bytes;  // of an element, 0 without a mask; from row to row, 0 if one row serves all; of a tile
};

struct Attention {
  fuseline_attention call;
  int group;           // query heads of a key head
  int left, right;     // of the diagonal, both kept; kUnlimited: all
  float scale, scale_log2, inverse_scale, cap;  // scale_log2: times log2(e); cap 0: none
  MaskTile mask_tile;  // the launcher's
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

// What the backward in one pass works with: sums that blocks add to in turn, and how many have. Of grad_q for tiles of 64 rows,
// [batch, heads, tiles]; of grad_k and grad_v for tiles of 128 keys, [batch, kv_heads, tiles], where heads share their keys.
struct SinglePassScratch {
  float *partial, *key_partial;
  int *turns, *key_turns;
  // What dropout keeps, [batch, heads, tiles of 64 rows, tiles of 128 keys, KeptBits::kWords]; null without dropout.
  uint32_t* kept;
};

// What dropout keeps of 64 rows and 128 keys, a bit an element, in the order in which lanes with keys as rows of a product read
// it. A word has four rows and eight neighbouring keys: byte b is row (0, 1, 8 or 9)[b] + 2 quad + 16 (rows / 16), bit i key i.
struct KeptBits {
  static constexpr int kRows = 64, kKeys = 128;
  // Of 16 rows and 64 keys; of all rows and 64 keys; of all.
  static constexpr int kStrip = 32, kHalf = kRows / 16 * kStrip, kWords = 2 * kHalf;
  static constexpr int kBytes = kWords * int(sizeof(uint32_t));
};

constexpr int kUnlimited = 1 << 30;

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

// Scores need nothing but their scale and the keys' bounds, and probabilities perhaps dropout.
inline bool plain_but_for_dropout(const Attention& a) {
  return a.call.mask_kind == FUSELINE_MASK_NONE && a.cap == 0.f && a.scale > 0.f;
}
inline bool plain_scores(const Attention& a) { return plain_but_for_dropout(a) && a.dropout.seed == nullptr; }

// Why the kernels do not take a call; 0 if they do.
inline int attention_refusal(const fuseline_attention& c) {
  if (c.batch < 0 || c.heads < 0 || c.seqlen_q < 0 || c.seqlen_k < 0) return FUSELINE_BAD_SIZE;
  const bool dims = c.head_dim >= 8 && c.head_dim <= 256 && c.head_dim % 8 == 0;
  const bool heads = c.kv_heads > 0 && c.heads % c.kv_heads == 0;
  const bool lengths = c.seqlen_q < kUnlimited && c.seqlen_k < kUnlimited;
  const bool packed = !c.cu_seqlens_q == !c.cu_seqlens_k && (!c.cu_seqlens_q || c.batch == 1);
  const bool kinds = c.mask_kind >= FUSELINE_MASK_NONE && c.mask_kind <= FUSELINE_MASK_ADD_FP32 &&
                     c.causal >= FUSELINE_CAUSAL_NONE && c.causal <= FUSELINE_CAUSAL_BOTTOM_RIGHT;
  const bool dtype = c.dtype >= FUSELINE_FLOAT32 && c.dtype <= FUSELINE_BFLOAT16;
  return dims && heads && lengths && packed && kinds && dtype ? 0 : FUSELINE_UNSUPPORTED;
}

inline bool in_vectors(const void* pointer, const int64_t (&strides)[3], int element_size) {
  bool all = uintptr_t(pointer) % 16 == 0;
  for (const int64_t stride : strides) all = all && stride * element_size % 16 == 0;
  return all;
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
