// The tiles of attention's kernels: what their blocks hold, and in how much shared memory.
#pragma once

#include <type_traits>

#include "../fuseline_attention.h"
#include "device.h"

namespace fuseline {

constexpr int kWidestHead = 256;         // of tiles
constexpr int kMostKeySplits = 64, kFewKeySplits = 8;  // blocks that share keys; of few, fewer threads add up the parts
constexpr int kUnlimited = 1 << 30;      // of a window

// Tiles of the mask in shared memory.
struct MaskTile {
  bool in_vectors;         // its rows can be copied in 16 bytes
  int size, pitch, bytes;  // of an element, 0 without a mask; from row to row, 0 if one row serves all; of a tile
};

// The tiles of a kernel that holds rows x keys of scores at a time.
inline MaskTile mask_tile_of(const fuseline_attention& c, int rows, int keys) {
  MaskTile tile{};
  if (c.mask_kind == FUSELINE_MASK_NONE) return tile;
  tile.size = c.mask_kind == FUSELINE_MASK_BOOL                              ? 1
              : c.mask_kind == FUSELINE_MASK_ADD && c.dtype != FUSELINE_FLOAT32 ? 2
                                                                             : 4;
  tile.pitch = c.mask_strides[2] == 0 ? 0 : keys * tile.size + 16;
  tile.bytes = tile.pitch == 0 ? keys * tile.size : rows * tile.pitch;
  const int64_t offsets = int64_t(reinterpret_cast<uintptr_t>(c.mask)) |
                          (c.mask_strides[0] | c.mask_strides[1] | c.mask_strides[2]) * tile.size;
  tile.in_vectors = c.cu_seqlens_q == nullptr && c.mask_strides[3] == 1 && offsets % 16 == 0;
  return tile;
}

inline int size_of(const fuseline_attention& c) { return c.dtype == FUSELINE_FLOAT32 ? 4 : 2; }

inline bool drops(const fuseline_attention& c) { return c.seed != nullptr && c.dropout > 0; }

// Scores need nothing but their scale and the keys' bounds, and probabilities perhaps dropout.
inline bool plain_but_for_dropout(const fuseline_attention& c) {
  return c.mask_kind == FUSELINE_MASK_NONE && float(c.soft_cap) == 0.f && float(c.softmax_scale) > 0.f;
}

inline bool in_vectors(const void* pointer, const int64_t (&strides)[3], int element_size) {
  bool all = uintptr_t(pointer) % 16 == 0;
  for (const int64_t stride : strides) all = all && stride * element_size % 16 == 0;
  return all;
}

// Of a block: 16 m rows or keys of each of its warps hold still, `step` of the other pass by at a time, `stages` of them there or
// under way; its bytes of shared memory, but for the mask's.
struct AttentionTiles {
  int m, warps, step, stages, shared;
  constexpr int held() const { return 16 * m * warps; }
  constexpr int threads() const { return kWarp * warps; }
};

// Calls run(std::integral_constant<int, size>{}) with that of the plan's tiles, of those from kLeast to kMost.
template <int kLeast, int kMost, class Run>
int with_size(int size, Run&& run) {
  if constexpr (kLeast < kMost) {
    if (size > kLeast) return with_size<2 * kLeast, kMost>(size, run);
  }
  return run(std::integral_constant<int, kLeast>{});
}

// Elements from row to row of a tile.
constexpr int pitch_of(int size, int width) { return width + 16 / size; }

// As many sums and scores as registers hold.
constexpr AttentionTiles forward_tiles(int size, int width, bool plain) {
  const bool exact = size == 4;
  const int m = width <= 64 || (width == 128 && (plain || exact)) ? 2 : 1;
  const int keys = exact ? (width <= 64 ? 32 : 16) : width == 256 || (!plain && width == 128) ? 32 : width == 128 ? 48 : 64;
  return {m, 4, keys, 2, (64 * m + 4 * keys) * pitch_of(size, width) * size};
}

// The same of the backward, and of what a general call does to scores and their gradients. Of keys, and of query rows.
constexpr AttentionTiles backward_tiles(int size, int width, bool plain) {
  const bool exact = size == 4;
  const int m = width <= 64 && !exact ? 2 : 1, warps = exact && width == 256 ? 2 : 4;
  const int step = exact && width > 64 ? (width == 128 ? 16 : 8) : plain && width == 128 ? 64 : 32;
  return {m, warps, step, 2, (32 * m * warps + 4 * step) * pitch_of(size, width) * size + 4 * step * 4};
}
constexpr AttentionTiles backward_row_tiles(int size, int width, bool plain) {
  const bool exact = size == 4;
  const int m = exact ? (width == 64 ? 2 : 1) : width <= (plain ? 128 : 64) ? 2 : 1, warps = exact && width == 256 ? 2 : 4;
  const int step = exact || (width == 256 && !plain) ? 16 : 32;
  return {m, warps, step, 2, (32 * m * warps + 4 * step) * pitch_of(size, width) * size};
}

// By products of warpgroups, in 16 bits, of widths 64 and 128.
constexpr AttentionTiles forward_panels(int width) { return {1, 4, 64, 2, (64 + 4 * 64) * width * 2}; }
constexpr AttentionTiles backward_panels(int width, bool plain) {
  const int step = width == 64 || plain ? 64 : 32;
  return {1, 4, step, 2, (2 * 64 + 4 * step) * width * 2 + 4 * step * 4};
}

// The gradient of a mask: q, grad_out, k and v of as many rows as keys; two stages where there is room for as many blocks.
constexpr AttentionTiles grad_mask_tiles(int size, int width) {
  const int warps = size == 4 && width == 256 ? 2 : 4, stages = width == 64 && size != 4 ? 2 : 1;
  return {1, warps, 16 * warps, stages, stages * 4 * 16 * warps * pitch_of(size, width) * size};
}
constexpr AttentionTiles grad_mask_panels(int width) {
  const int stages = width == 64 ? 2 : 1;
  return {1, 4, 64, stages, stages * 4 * 64 * width * 2};
}

// Few query rows: four warps have 16 each, or the same, of which each then has keys of its own. Queries stay in registers, or in
// a tile.
constexpr bool split_holds_queries(int width, int row_warps) { return width <= 128 || row_warps == 1; }
constexpr AttentionTiles split_tiles(int size, int width, int row_warps) {
  const int keys = width == 256 && row_warps == 4 ? 32 : 16 * row_warps;
  const int stages = width <= 64 ? 4 : width == 128 || row_warps == 4 ? 3 : 2;
  const int rows = 4 / row_warps * stages * 2 * keys + (split_holds_queries(width, row_warps) ? 0 : 16 * row_warps);
  return {1, 4, keys, stages, rows * pitch_of(size, width) * size};
}

// All gradients in one pass: 64 rows, 128 keys, heads of 64.
constexpr int kSinglePassThreads = 256, kSinglePassShared = 85080;

// What dropout keeps of 64 rows and 128 keys, a bit an element, in the order in which lanes with keys as rows of a product read
// it. A word has four rows and eight neighbouring keys: byte b is row (0, 1, 8 or 9)[b] + 2 quad + 16 (rows / 16), bit i key i.
struct KeptBits {
  static constexpr int kRows = 64, kKeys = 128;
  // Of 16 rows and 64 keys; of all rows and 64 keys; of all.
  static constexpr int kStrip = 32, kHalf = kRows / 16 * kStrip, kWords = 2 * kHalf;
  static constexpr int kBytes = kWords * int(sizeof(uint32_t));
};

// How the gradient of a mask is cut: into tiles, each a block's, which goes through all scores that it is the sum of, or through
// one of `pieces` of that way.
struct MaskGradientParts {
  int64_t size;
  int batches, heads, row_tiles, key_tiles;            // of the gradient
  int over_batches, over_heads, over_rows, over_keys;  // summed for one tile of it
  int pieces;
  bool mask_stays;  // one tile of the mask is that of the whole way
};

}  // namespace fuseline
