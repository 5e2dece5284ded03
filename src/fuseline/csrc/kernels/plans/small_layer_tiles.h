// The tiles of the small attention layer's kernels: what their blocks hold, where it lies, and in how much shared memory.
#pragma once

#include "../fuseline_small_layer.h"
#include "device.h"

namespace fuseline::small_layer {

constexpr int kBlock = 256;            // threads of every block
constexpr int kLineBytes = 128;        // of a row's k, that a stage of a ring has at a time
constexpr int kPaddedLine = kLineBytes + 16;  // where threads copy it, against conflicts of banks
constexpr int kMostRingStages = 16;    // of chunks
constexpr int kReadPast = 256;         // bytes behind rows that products of narrow heads read past, and drop

inline bool is_exact(const fuseline_small_layer& layer) { return layer.dtype == FUSELINE_FLOAT32 && !layer.tf32; }
inline int element_size(const fuseline_small_layer& layer) { return layer.dtype == FUSELINE_FLOAT32 ? 4 : 2; }
inline int64_t tokens_of(const fuseline_small_layer& layer) { return layer.batch * layer.seqlen; }
inline int64_t projected_of(const fuseline_small_layer& layer) {  // columns of qkv
  return (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
}

// Elements from row to row in shared memory, of rows of so many.
constexpr int pitch_of(int64_t elements, int size) { return int(elements + 15) / 16 * 16 + 16 / size; }

inline int log2_of(int64_t power) {
  int log2 = 0;
  while (int64_t(1) << log2 < power) ++log2;
  return log2;
}

// ---- forward, in one launch ----

constexpr int kProjected = 192;  // columns of q, k, v that a block makes at a time
constexpr int kMostProjected = 384;
constexpr int kOutColumns = 64;
// Bytes of tables beside the dynamic shared memory, which begins at a whole 1,024: kernels compiled together with it ask for that.
constexpr int kForwardTables = (kMostProjected * 8 + kOutColumns * 4 + 1023) / 1024 * 1024;

// Stages of the ring: few rows are a matter of bytes in flight, many of shared memory.
constexpr int forward_stages(int rows, int size) { return rows <= 32 ? 4 : rows == 128 && size == 4 ? 2 : 3; }
constexpr int forward_ring(int rows, int size) { return forward_stages(rows, size) * (rows + kProjected) * kPaddedLine; }

// Shared memory: q, k, v, and what is read past them; then the ring, whose place weights of the output projection take later,
// and what they multiply.
struct ForwardLayout {
  int pitch;       // of q, k, v
  int held_pitch;  // of the weights, and of the rows attended to, if these are held
  bool holds;
  size_t bytes;
};

inline ForwardLayout forward_layout(const fuseline_small_layer& layer, int rows, int heads_each, int most_bytes) {
  const int size = element_size(layer);
  ForwardLayout layout{};
  layout.pitch = pitch_of(3 * heads_each * layer.head_dim, size);
  layout.held_pitch = pitch_of(layer.num_heads * layer.head_dim, size);
  const size_t projected = size_t(rows) * layout.pitch * size + kReadPast;
  const size_t held = size_t(rows + kOutColumns) * layout.held_pitch * size;
  const size_t ring = forward_ring(rows, size);
  layout.holds = projected + std::max(ring, held) <= size_t(most_bytes);
  layout.bytes = projected + (layout.holds ? std::max(ring, held) : ring);
  return layout;
}

// ---- forward, in two launches ----

// A product of rows x columns whose operands come in chunks of 128 bytes of k. A warp has 16 `tall` rows and 8 `wide` columns,
// by warpgroups 16 rows and all columns; `splits` warps have the same and share the chunks.
struct ChunkTiles {
  int rows = 0, columns = 0, tall = 1, wide = 1, splits = 1;
  bool warpgroups = false;

  constexpr int stage_bytes() const { return (rows + columns) * kLineBytes; }
  constexpr int sum_bytes() const { return splits * rows * (columns + 8) * 4; }

  // Stages of the ring for `chunks`, where there is `room` for so many bytes; 0 if it is too small. A stage that is used again
  // is read by the same warps each time: others could wait for its second chunk before the first has come, and take the barrier
  // of that for open.
  constexpr int stages(int chunks, int room) const {
    const int most = std::min(kMostRingStages, room / stage_bytes()), found = chunks <= most ? chunks : most - most % splits;
    return found < std::min(chunks, splits) ? 0 : found;
  }
};

constexpr int kHeadsWidth = 64;  // of q that a cluster makes: of one head, or of several narrow ones

// Without tensor cores shared memory is what limits, of which a square of sums reads least (8 x (64, 256): 29.8 us with 3 wide,
// 30.9 with 6; 8 x (16, 512): 23.0 and 25.4).
constexpr ChunkTiles heads_tiles(int rows, int blocks, bool exact, bool warpgroups) {
  const int columns = 3 * kHeadsWidth / blocks, tall = exact ? 2 : 1, wide = exact ? 3 : 6;
  if (warpgroups) return {rows, columns, 1, columns / 8, 128 / rows, true};
  return {rows, columns, tall, wide, kBlock / kWarp / (rows / (16 * tall) * (columns / (8 * wide)))};
}

constexpr int heads_keys(int rows) { return rows == 128 ? 64 : 16; }  // of a warp
constexpr int heads_pitch(int size) { return pitch_of(3 * kHeadsWidth, size); }  // of q, k and v
constexpr int heads_tile_bytes(int rows, int size) { return rows * heads_pitch(size) * size; }
constexpr bool heads_reuse(int rows) { return rows == 128; }  // q, k and v lie where the chunks lay
constexpr bool heads_share(int rows, bool warpgroups) { return warpgroups && rows == 64; }  // what is fetched, with their cluster

struct HeadsLayout {
  int batches_log2;      // batch elements of a row group
  int groups_log2;       // row groups of a cluster: if there are two, all its blocks fetch for each other
  int seqlen_log2;       // rows of each, a power of two
  int head_dim_log2;
  int tasks_log2;        // of 16 queries and a head, that a block attends for
  int parts_log2;        // of the keys, in which a task is shared among warps
  int stages, chunks;    // of k
  int tile, partials, barriers, biases;  // where these begin in shared memory, bytes
};

struct OutLayout {
  int stages, chunks;  // of k
  int barriers;        // where these begin in shared memory, bytes
};

// Tiles of the output projection.
inline constexpr ChunkTiles kOutByWarpgroups{64, 64, 1, 8, 2, true}, kOutLarge{64, 64, 1, 4, 1}, kOutSquare{32, 32, 1, 4, 4},
    kOutFlat{16, 64, 1, 4, 4}, kOutSmall{32, 16, 2, 2, 8};

// ---- backward ----

constexpr int kHeadColumns = 64;  // of a head that a block multiplies at a time
constexpr int kSide = 64;         // of a tile of the products that remain
constexpr int kRemainingStages = 4;
constexpr int kSumColumns = 16;   // that a block sums

// Of a ring in whose stages one operand has so many rows, and the other lines of so many columns.
constexpr int ring_bytes(int stages, int rows, int columns) { return stages * (rows * kPaddedLine + kLineBytes * (columns + 8)); }
constexpr int kRemainingBytes = ring_bytes(kRemainingStages, kSide, kSide);

// Shared memory of a head's block: q, k, v and grad of attended, so many rows each; then the ring, whose place the probabilities,
// and after them the gradients of the scores, take.
constexpr int head_stages(int rows) { return rows == 128 ? 3 : 4; }
inline size_t head_bytes(int rows, int size, int64_t head_dim) {
  return size_t(4 * rows * pitch_of(head_dim, size)) * size +
         std::max(rows * (rows + 8) * size, ring_bytes(head_stages(rows), rows, kHeadColumns)) + kReadPast;
}

}  // namespace fuseline::small_layer
