// The launches of attention's backward: delta, which the kernels that follow read, and these.
#pragma once

#include "attention.h"

namespace fuseline {

constexpr int kDeltaThreads = 256, kLanesARow = 8, kDeltaRows = kDeltaThreads / kLanesARow, kStatisticRows = 64;
static_assert(kStatisticRows % kDeltaRows == 0);
constexpr int kLeftRows = 64;  // a tile of rows_leaving

// delta and lse_log2 have entries for what fills the last tile of rows.
inline int64_t statistic_rows(const fuseline_attention& c) { return divide_up(c.seqlen_q, kStatisticRows) * kStatisticRows; }
inline int64_t statistics_bytes(const fuseline_attention& c) {
  return c.batch * c.heads * statistic_rows(c) * int64_t(sizeof(float));
}

// The parts of what lies in the workspace for the single pass behind delta and lse_log2. There are as many turns of keys as of
// rows, which are more.
struct SinglePassBytes {
  int64_t partial, key_partial, turns, kept;
  explicit SinglePassBytes(const fuseline_attention& c) {
    constexpr int64_t kSums = 64 * int64_t(sizeof(float)), kKeys = KeptBits::kKeys;
    const int64_t rows = c.batch * c.heads * statistic_rows(c), key_tiles = divide_up(c.seqlen_k, kKeys);
    partial = rows * kSums;
    key_partial = c.heads == c.kv_heads ? 0 : 2 * c.batch * c.kv_heads * key_tiles * kKeys * kSums;
    turns = rows / kStatisticRows * int64_t(sizeof(int));
    kept = drops(c) ? rows / KeptBits::kRows * key_tiles * KeptBits::kBytes : 0;
  }
  int64_t all() const { return partial + key_partial + kept + 2 * turns; }
};

namespace attention_plans {

// Whether the bulk copies do not take a tensor [batch, heads, rows, head_dim].
inline bool expanded(const int64_t (&strides)[3], int64_t batch, int64_t heads, int64_t rows) {
  return (batch > 1 && strides[0] == 0) || (heads > 1 && strides[1] == 0) || (rows > 1 && strides[2] == 0);
}

// Self-attention of plain scores in bf16 with all of its gradients, heads of 33 to 64, on Hopper. With dropout, rows of whole
// blocks of Philox, and no more of them than their sums of grad_q take as much room as the bits of what is kept; and something
// is kept, since what comes from grad_lse is divided by its scale.
inline bool takes_single_pass(const fuseline_attention_gradients& g, const Device& device) {
  const fuseline_attention& c = g.call;
  const bool shape = c.dtype == FUSELINE_BFLOAT16 && c.head_dim > 32 && c.head_dim <= 64 && c.seqlen_q == c.seqlen_k &&
                     c.cu_seqlens_q == nullptr && c.seqlen_q > 0;
  if (!shape || !g.grad_q || !g.grad_k || !g.grad_v || !device.warpgroups || !plain_but_for_dropout(c)) return false;
  constexpr int64_t kMostDropped = 2048;
  const bool drawn = c.seqlen_k % 8 == 0 && c.seqlen_k <= kMostDropped && c.dropout < 1 && g.grad_sinks == nullptr;
  const auto bounds = [](int64_t window) { return window >= 0 && window < kUnlimited; };
  const bool windows = bounds(c.window_left) || (c.causal == FUSELINE_CAUSAL_NONE && bounds(c.window_right));
  const bool copied = !expanded(c.q_strides, c.batch, c.heads, c.seqlen_q) &&
                      !expanded(c.k_strides, c.batch, c.kv_heads, c.seqlen_k) &&
                      !expanded(c.v_strides, c.batch, c.kv_heads, c.seqlen_k) &&
                      !expanded(g.grad_out_strides, c.batch, c.heads, c.seqlen_q);
  return !windows && (!drops(c) || drawn) && copied;
}

// Tiles of rows of which rows_leaving leaves the gradients of scores at a time, for the mask's to be their sum; 0: it is computed
// from q, k and v once more.
inline int64_t left_bytes(const fuseline_attention& c) {  // of a tile of rows
  return c.batch * c.heads * divide_up(c.seqlen_k, kLeftRows) * kLeftRows * kLeftRows * 2;
}

inline int64_t left_tiles(const fuseline_attention_gradients& g, const Device& device) {
  constexpr int64_t kMostBytes = int64_t(256) << 20, kFewestBlocks = 3;  // of a multiprocessor, unless all tiles fit
  const fuseline_attention& c = g.call;
  const bool each = g.grad_mask_strides[2] != 0 && g.grad_mask_strides[3] != 0;  // row and key has its own
  const bool fits = g.grad_q && c.mask_kind > FUSELINE_MASK_BOOL && each && !c.cu_seqlens_q && c.soft_cap == 0 &&
                    c.dtype == FUSELINE_BFLOAT16 && c.head_dim <= 128 && device.warpgroups && c.seqlen_q > 0 && c.seqlen_k > 0;
  if (!fits) return 0;
  const int64_t all = divide_up(c.seqlen_q, kLeftRows), most = kMostBytes / left_bytes(c);
  if (all <= most) return all;
  return most * c.batch * c.heads >= kFewestBlocks * device.processors ? most : 0;
}

inline MaskGradientParts mask_parts(const fuseline_attention_gradients& g) {
  const fuseline_attention& c = g.call;
  const int tile = c.dtype == FUSELINE_FLOAT32 && c.head_dim > 64 ? 32 : 64;  // rows and keys of a block
  const bool packed = c.cu_seqlens_q != nullptr;
  const int64_t(&strides)[4] = g.grad_mask_strides;
  const int64_t sizes[4] = {c.batch, c.heads, c.seqlen_q, c.seqlen_k};
  MaskGradientParts of{1};
  for (int i = 0; i < 4; ++i) of.size *= strides[i] != 0 ? sizes[i] : 1;
  const bool one_row = strides[2] == 0, one_key = strides[3] == 0;
  const auto part = [](bool apart, int64_t count, int& places, int& over) {
    places = int(apart ? count : 1), over = int(apart ? 1 : count);
  };
  part(packed ? !one_row || !one_key : strides[0] != 0, packed ? c.sequences : c.batch, of.batches, of.over_batches);
  part(strides[1] != 0, c.heads, of.heads, of.over_heads);
  part(!one_row, divide_up(packed ? c.max_seqlen_q : c.seqlen_q, tile), of.row_tiles, of.over_rows);
  part(!one_key, divide_up(packed ? c.max_seqlen_k : c.seqlen_k, tile), of.key_tiles, of.over_keys);
  // Blocks for a large device, as long as each has some way to go and the pieces' memory stays small.
  constexpr int64_t kBlocks = 528, kMostPieces = 64, kMostBytes = int64_t(64) << 20;
  const int64_t places = int64_t(of.batches) * of.heads * of.row_tiles * of.key_tiles;
  const int64_t way = int64_t(of.over_batches) * of.over_heads * of.over_rows * of.over_keys;
  const int64_t pieces = std::min({divide_up(kBlocks, std::max<int64_t>(1, places)), way, kMostPieces,
                                   kMostBytes / std::max<int64_t>(4, of.size * 4)});
  of.pieces = int(std::max<int64_t>(1, pieces));
  of.mask_stays = of.over_heads * of.over_rows * of.over_keys == 1 && (of.over_batches == 1 || c.mask_strides[0] == 0) && !packed;
  return of;
}

// grad_k, grad_v and grad_q, of which the last may be left to rows_leaving; false where a block has no room for its tiles.
inline void add_sums(AttentionPlan& plan, const fuseline_attention_gradients& g, bool grad_q, const Device& device) {
  const fuseline_attention& c = g.call;
  const bool plain = takes_plain(c), of_keys = g.grad_k || g.grad_v;
  if (takes_panels(c, device)) {
    const int width = width_by_warpgroups(c);
    const AttentionTiles tiles = backward_panels(width, plain);
    const AttentionLaunch keys = tiled(AttentionKernel::keys_panels, c, true, width, plain, tiles);
    const AttentionLaunch rows = tiled(AttentionKernel::rows_panels, c, false, width, plain, tiles);
    if (std::max(keys.shape.shared, rows.shape.shared) <= size_t(device.shared_a_block)) {
      plan.reason = "products of warpgroups: one pass over the scores for keys and values, one for queries";
      if (of_keys) add(plan, device, keys);
      if (grad_q) add(plan, device, rows);
      return;
    }
  }
  plan.reason = kByWarps;
  const int width = width_by_warps(c, plain), size = size_of(c);
  const AttentionLaunch keys = tiled(AttentionKernel::keys, c, true, width, plain, backward_tiles(size, width, plain));
  const auto add_keys = [&](AttentionKernel kernel) {
    add(plan, device, keys);
    if (plan.code == 0 && keys.shape.grid > 0) plan.launches[plan.count - 1].kernel = kernel;
  };
  if (width <= 128 && of_keys) add_keys(AttentionKernel::keys);
  if (width > 128 && g.grad_k) add_keys(AttentionKernel::keys_k);  // registers hold one of the two sums
  if (width > 128 && g.grad_v) add_keys(AttentionKernel::keys_v);
  if (grad_q) add(plan, device, tiled(AttentionKernel::rows, c, false, width, plain, backward_row_tiles(size, width, plain)));
}

// grad_q and the mask's gradient together, `plan.left_tiles` tiles of rows at a time.
inline void add_leaving(AttentionPlan& plan, const fuseline_attention_gradients& g, const Device& device) {
  const fuseline_attention& c = g.call;
  const int width = width_by_warpgroups(c);
  const AttentionTiles tiles = backward_panels(width, false);
  AttentionLaunch rows = tiled(AttentionKernel::rows_leaving, c, false, width, false, tiles);
  rows.shape.grid = rows.shape.grid / rows.tiles * plan.left_tiles, rows.tiles = int(plan.left_tiles);
  add(plan, device, rows);
  const int64_t outer = (g.grad_mask_strides[0] != 0 ? c.batch : 1) * (g.grad_mask_strides[1] != 0 ? c.heads : 1);
  AttentionLaunch sum{AttentionKernel::sum_left, {divide_up(c.seqlen_k, tiles.step) * plan.left_tiles * outer, 128}, width};
  add(plan, device, sum);
  plan.workspace += size_t(plan.left_tiles * left_bytes(c));
}

// No model trains biases of fp16, or of fp32 with wide heads: Hopper has one kernel for the first, the second one of wide tiles.
inline void add_mask_gradient(AttentionPlan& plan, const fuseline_attention_gradients& g, const Device& device) {
  const fuseline_attention& c = g.call;
  const MaskGradientParts& of = plan.mask = mask_parts(g);
  if (of.size == 0) return;
  const bool panels = c.dtype == FUSELINE_BFLOAT16 && device.warpgroups && c.head_dim <= 128;
  const bool by_width = c.dtype == FUSELINE_FLOAT32 ? c.head_dim <= 64 : !device.warpgroups;
  const int width = panels ? width_by_warpgroups(c) : by_width ? width_of(c.head_dim, 64, kWidestHead) : kWidestHead;
  const AttentionTiles tiles = panels ? grad_mask_panels(width) : grad_mask_tiles(size_of(c), width);
  AttentionLaunch launch{panels ? AttentionKernel::grad_mask_panels : AttentionKernel::grad_mask, {}, width};
  launch.mask_tile = mask_tile_of(c, tiles.held(), tiles.held());
  const int64_t blocks = int64_t(of.batches) * of.heads * of.row_tiles * of.key_tiles * of.pieces;
  launch.shape = {blocks, tiles.threads(), 1, 1, size_t(tiles.shared + (of.mask_stays ? 1 : tiles.stages) * launch.mask_tile.bytes)};
  if (c.cu_seqlens_q || blocks == 0) add(plan, device, {AttentionKernel::zeros, {1}});
  add(plan, device, launch);
  if (of.pieces == 1) return;
  plan.workspace += size_t(of.pieces) * of.size * sizeof(float);
  add(plan, device, {AttentionKernel::sum_pieces, {divide_up(of.size, 256), 256}});
}

inline AttentionPlan plan_short_backward(const fuseline_attention_gradients& g, const Device& device) {
  const fuseline_attention& c = g.call;
  if (!g.grad_q && !g.grad_k && !g.grad_v) return refuse(0, "no gradient is wanted");
  AttentionPlan plan = plan_short(c, true, device);
  if (plan.form.grouped == 0) return plan;
  const int64_t rows = (c.cu_seqlens_q ? 1 : c.batch) * c.kv_heads * c.seqlen_k;
  const AttentionLaunch sum{AttentionKernel::sum_groups, {divide_up(rows * (c.head_dim / 8), 256), 256}};
  if (g.grad_k) add(plan, device, sum);
  if (g.grad_v) add(plan, device, sum);
  return plan;
}

}  // namespace attention_plans

inline AttentionPlan plan_attention_backward(const fuseline_attention_gradients& g, const Device& device) {
  using namespace attention_plans;
  const fuseline_attention& c = g.call;
  const bool is_short = !g.grad_mask && !g.grad_sinks && short_attention::fits(c, true, device);
  if (const int code = is_short ? 0 : refusal(c)) return refuse(code, kRefused);
  const auto fits = [&](const void* x, const int64_t(&strides)[3]) { return !x || in_vectors(x, strides, size_of(c)); };
  if (!reads(c) || !(is_short || fits(c.out, c.out_strides)) || !fits(g.grad_out, g.grad_out_strides) ||
      !fits(g.grad_q, g.grad_q_strides) || !fits(g.grad_k, g.grad_k_strides) || !fits(g.grad_v, g.grad_v_strides)) {
    return refuse(FUSELINE_UNSUPPORTED, kUneven);
  }
  if (is_short) return plan_short_backward(g, device);
  if (c.batch == 0 || c.heads == 0) return refuse(0, "there is nothing to compute");
  AttentionPlan plan;
  plan.workspace = size_t(2 * statistics_bytes(c));
  add(plan, device, {AttentionKernel::delta, {c.batch * c.heads * (statistic_rows(c) / kDeltaRows), kDeltaThreads}});
  if (g.grad_sinks) add(plan, device, {AttentionKernel::grad_sinks, {c.heads, kDeltaThreads}});
  if (takes_single_pass(g, device)) {
    plan.reason = "plain self-attention in bf16, heads of 33 to 64: one pass over the scores for all gradients";
    plan.workspace += size_t(SinglePassBytes(c).all());
    add(plan, device, tiled(AttentionKernel::single, c, true, 64, true, {1, 8, 64, 2, kSinglePassShared}));
    return plan;
  }
  plan.left_tiles = g.grad_mask ? left_tiles(g, device) : 0;
  add_sums(plan, g, g.grad_q && plan.left_tiles == 0, device);
  if (plan.left_tiles > 0) {
    add_leaving(plan, g, device);
  } else if (g.grad_mask) {
    add_mask_gradient(plan, g, device);
  }
  return plan.code != 0 ? refuse(plan.code, plan.reason) : plan;
}

}  // namespace fuseline
