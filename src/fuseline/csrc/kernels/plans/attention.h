// Which kernels compute attention, and how: the one place that decides. The launchers in attention/ launch what the plan says, in
// its order, and `fuseline explain attention` prints it. Plans read a call's record; they follow none of its pointers.
#pragma once

#include "attention_short.h"
#include "attention_tiles.h"

namespace fuseline {

enum class AttentionKernel {
  short_forward, short_forward_warpgroups, short_backward, short_backward_warpgroups,  // whole problems on chip
  sum_groups,                   // the gradients of a head of keys from those of its query heads
  split, combine, combine_few,  // few query rows: blocks share the keys, and a launch adds up their parts
  forward, forward_panels,      // tiles of any problem, by products of warps or of warpgroups
  delta, grad_sinks,            // what the backward wants of a row beforehand
  single,                       // all gradients in one pass
  keys, keys_k, keys_v, rows,   // grad_k and grad_v, of wide heads one of them, and grad_q
  keys_panels, rows_panels,
  rows_leaving, sum_left,       // grad_q for some tiles of rows at a time, and what the mask's gradient is the sum of; that sum
  zeros, grad_mask, grad_mask_panels, sum_pieces  // the mask's gradient from the scores computed once more, or pieces of it
};

// As profilers show it.
inline const char* name_of(AttentionKernel kernel) {
  constexpr const char* kNames[] = {
      "short_forward", "short_forward_warpgroups", "short_backward", "short_backward_warpgroups", "sum_groups",
      "attention_split", "attention_combine", "attention_combine_few", "attention_forward", "attention_forward_panels",
      "attention_delta", "attention_grad_sinks", "attention_backward_single", "attention_backward_keys",
      "attention_backward_keys", "attention_backward_keys", "attention_backward_rows", "attention_backward_keys_panels",
      "attention_backward_rows_panels", "attention_backward_rows_panels", "sum_left", "memset", "attention_grad_mask",
      "attention_grad_mask", "sum_pieces"};
  return kNames[int(kernel)];
}

struct AttentionLaunch {
  AttentionKernel kernel;
  LaunchShape shape;  // of kernels of short sequences as many blocks as problems, of which those stay that the device holds
  int width = 0;      // head dims that the kernel's tiles hold
  bool plain = false;  // of scores with nothing but their scale and bounds; on Hopper's forward with dropout, too
  int tiles = 0;       // of a head
  MaskTile mask_tile{};
};

struct AttentionPlan {
  int code = 0;  // the answer where nothing is launched: 0, or why not
  const char* reason = "";
  size_t workspace = 0;
  int count = 0;
  AttentionLaunch launches[8];
  short_attention::Form form{};  // of short sequences
  int row_warps = 0, splits = 1, chunks = 0;  // of few rows: warps that share them, blocks that share keys, parts of the rows
  int64_t left_tiles = 0;                     // of rows_leaving: tiles of a launch; it and the sum come again while there are more
  MaskGradientParts mask{};

  const AttentionLaunch* begin() const { return launches; }
  const AttentionLaunch* end() const { return launches + count; }
};

namespace attention_plans {

inline AttentionPlan refuse(int code, const char* reason) {
  AttentionPlan plan;
  plan.code = code, plan.reason = reason;
  return plan;
}

// Adds a launch unless it has no blocks; a plan of more shared memory than a block may have launches nothing.
inline void add(AttentionPlan& plan, const Device& device, AttentionLaunch launch) {
  if (launch.shape.grid == 0 || plan.code != 0) return;
  if (launch.shape.shared > size_t(device.shared_a_block)) {
    plan = refuse(FUSELINE_UNSUPPORTED, "the tiles need more shared memory than the GPU has");
  } else {
    plan.launches[plan.count++] = launch;
  }
}

// A block for every tile, head and sequence: tiles of `held` keys or query rows. Packed calls have one sequence more, for what
// lies behind the others.
inline AttentionLaunch tiled(AttentionKernel kernel, const fuseline_attention& c, bool of_keys, int width, bool plain,
                             const AttentionTiles& tiles) {
  const bool packed = c.cu_seqlens_q != nullptr;
  const int64_t length = of_keys ? (packed ? c.max_seqlen_k : c.seqlen_k) : packed ? c.max_seqlen_q : c.seqlen_q;
  const int64_t count = std::max<int64_t>(packed, divide_up(length, tiles.held()));
  const bool grouped = of_keys && kernel != AttentionKernel::single;
  AttentionLaunch launch{kernel, {}, width, plain, int(count)};
  launch.mask_tile = of_keys ? mask_tile_of(c, tiles.step, tiles.held()) : mask_tile_of(c, tiles.held(), tiles.step);
  launch.shape = {launch.tiles * (grouped ? c.kv_heads : c.heads) * (packed ? c.sequences + 1 : c.batch), tiles.threads(), 1, 1,
                  size_t(tiles.shared + 2 * launch.mask_tile.bytes)};
  return launch;
}

inline int width_of(int64_t head_dim, int least, int most) {
  while (least < most && head_dim > least) least *= 2;
  return least;
}

// The widths of tiles by products of warps. Of plain scores in fp16, which no model has, heads of up to 64 share one, and wider
// ones than 128 are not plain.
inline int width_by_warps(const fuseline_attention& c, bool plain) {
  const bool half = c.dtype == FUSELINE_FLOAT16;
  return width_of(c.head_dim, plain && !half ? 32 : 64, plain && half ? 128 : kWidestHead);
}
inline int width_by_warpgroups(const fuseline_attention& c) { return c.head_dim <= 64 ? 64 : 128; }

// Whether kernels of plain scores compute a call, and whether on Hopper products of warpgroups do.
inline bool takes_plain(const fuseline_attention& c) {
  return plain_but_for_dropout(c) && !drops(c) && c.dtype != FUSELINE_FLOAT32 &&
         (c.dtype != FUSELINE_FLOAT16 || c.head_dim <= 128);
}
inline bool takes_panels(const fuseline_attention& c, const Device& device) {
  const bool narrow = c.dtype != FUSELINE_FLOAT16 && takes_plain(c) && c.head_dim <= 32;
  return device.warpgroups && c.dtype != FUSELINE_FLOAT32 && c.head_dim <= 128 && !narrow;
}

// Why the kernels do not take a call; 0 if they do.
inline int refusal(const fuseline_attention& c) {
  if (c.batch < 0 || c.heads < 0 || c.seqlen_q < 0 || c.seqlen_k < 0) return FUSELINE_BAD_SIZE;
  const bool dims = c.head_dim >= 8 && c.head_dim <= kWidestHead && c.head_dim % 8 == 0;
  const bool heads = c.kv_heads > 0 && c.heads % c.kv_heads == 0;
  const bool lengths = c.seqlen_q < kUnlimited && c.seqlen_k < kUnlimited;
  const bool packed = !c.cu_seqlens_q == !c.cu_seqlens_k && (!c.cu_seqlens_q || c.batch == 1);
  const bool kinds = c.mask_kind >= FUSELINE_MASK_NONE && c.mask_kind <= FUSELINE_MASK_ADD_FP32 &&
                     c.causal >= FUSELINE_CAUSAL_NONE && c.causal <= FUSELINE_CAUSAL_BOTTOM_RIGHT;
  const bool dtype = c.dtype >= FUSELINE_FLOAT32 && c.dtype <= FUSELINE_BFLOAT16;
  return dims && heads && lengths && packed && kinds && dtype ? 0 : FUSELINE_UNSUPPORTED;
}
constexpr const char* kRefused = "the kernels do not take such sizes, kinds or dtypes";
constexpr const char* kByWarps = "products of warps: by warpgroups there are none for this GPU, dtype, head dim or mask";
constexpr const char* kUneven = "a pointer or a stride is no multiple of 16 bytes";

inline bool reads(const fuseline_attention& c) {
  return in_vectors(c.q, c.q_strides, size_of(c)) && in_vectors(c.k, c.k_strides, size_of(c)) &&
         in_vectors(c.v, c.v_strides, size_of(c));
}

// A launch of the kernels of short sequences, with what their form says.
inline AttentionPlan plan_short(const fuseline_attention& c, bool backward, const Device& device) {
  AttentionPlan plan;
  plan.reason = "a block holds a whole head of a short sequence, and takes the next while there are more than the GPU holds";
  plan.form = short_attention::form_of(c, backward, device);
  const short_attention::Form& form = plan.form;
  const AttentionKernel kernel =
      backward ? (form.warpgroups ? AttentionKernel::short_backward_warpgroups : AttentionKernel::short_backward)
               : (form.warpgroups ? AttentionKernel::short_forward_warpgroups : AttentionKernel::short_forward);
  const int64_t problems = (c.cu_seqlens_q ? c.sequences : c.batch) * c.heads;
  plan.workspace = form.counter + 2 * form.grouped;
  add(plan, device, {kernel, {problems, 2 * form.length, 1, 1, size_t(form.shared)}, form.width, true});
  return plan;
}

// Few query rows over a long cache: its keys are split where that gives more blocks work.
inline bool is_split(const fuseline_attention& c) {
  constexpr int64_t kMostRows = 16, kFewestKeys = 512;
  return c.dtype != FUSELINE_FLOAT32 && c.cu_seqlens_q == nullptr && c.dropout == 0 && c.seqlen_q <= kMostRows &&
         c.seqlen_k >= kFewestKeys;
}

inline AttentionPlan plan_split(const fuseline_attention& c, const Device& device) {
  constexpr int64_t kFewestKeys = 256;  // of a block: less is not worth what its sums cost
  AttentionPlan plan;
  plan.reason = "few query rows over many keys: blocks share the keys";
  const int64_t of_head = c.seqlen_q * (c.heads / c.kv_heads), rows = c.batch * c.heads * c.seqlen_q;
  plan.row_warps = of_head <= 16 ? 1 : 4;  // one if its products hold all rows of a key head
  plan.chunks = int(divide_up(of_head, 16 * plan.row_warps));
  const int64_t blocks = plan.chunks * c.kv_heads * c.batch, most = divide_up(c.seqlen_k, kFewestKeys);
  const int at_once = (c.head_dim <= 128 ? 2 : 1) * device.processors;
  plan.splits = int(std::max<int64_t>(1, std::min<int64_t>({most, at_once / std::max<int64_t>(1, blocks), kMostKeySplits})));
  // The only part is the result.
  plan.workspace = plan.splits == 1 ? 16 : size_t(plan.splits) * rows * (c.head_dim + 2) * sizeof(float);
  const int width = width_of(c.head_dim, 64, kWidestHead);
  const size_t shared = split_tiles(2, width, plan.row_warps).shared;
  add(plan, device, {AttentionKernel::split, {blocks * plan.splits, 128, 1, 1, shared}, width});
  if (plan.splits > kFewKeySplits) {
    add(plan, device, {AttentionKernel::combine, {rows, 256, 1, 1, size_t(plan.splits * c.head_dim * 4)}});
  } else if (plan.splits > 1) {
    add(plan, device, {AttentionKernel::combine_few, {divide_up(rows, 256 / kWarp), 256, 1, 1, 0}});
  }
  return plan;
}

// Packed sequences that come forward sooner by the general kernels: longest 128, head dim 64, 161 us on chip and 128 (H100);
// head dim 128, 117 and 130; longest 64, 66 and 73. On chip every sequence takes a whole block's turn, however short it is.
inline bool is_longer_packed(const fuseline_attention& c) {
  constexpr int64_t kTurn = 64;
  return c.cu_seqlens_q && std::max(c.max_seqlen_q, c.max_seqlen_k) > kTurn && c.head_dim > 32 && c.head_dim <= 64;
}

}  // namespace attention_plans

inline AttentionPlan plan_attention_forward(const fuseline_attention& c, const Device& device) {
  using namespace attention_plans;
  const bool is_short = short_attention::fits(c, false, device) && !is_longer_packed(c);
  if (const int code = is_short ? 0 : refusal(c)) return refuse(code, kRefused);
  if (c.batch == 0 || c.heads == 0 || c.seqlen_q == 0) return refuse(0, "there is nothing to compute");
  if (!reads(c) || !in_vectors(c.out, c.out_strides, size_of(c))) return refuse(FUSELINE_UNSUPPORTED, kUneven);
  if (is_short) return plan_short(c, false, device);
  if (is_split(c)) return plan_split(c, device);
  AttentionPlan plan;
  if (takes_panels(c, device)) {
    // One block alone waits for each of its own products (fp32 masks at head dim 128: 750 us, by products of warps 726).
    const int width = width_by_warpgroups(c);
    const AttentionLaunch launch =
        tiled(AttentionKernel::forward_panels, c, false, width, plain_but_for_dropout(c), forward_panels(width));
    if (2 * (int(launch.shape.shared) + 1024) <= device.shared_a_processor) {
      plan.reason = "products of warpgroups, and a multiprocessor holds two blocks or more";
      return add(plan, device, launch), plan;
    }
  }
  plan.reason = kByWarps;
  const bool plain = takes_plain(c);
  const int width = width_by_warps(c, plain);
  add(plan, device, tiled(AttentionKernel::forward, c, false, width, plain, forward_tiles(size_of(c), width, plain)));
  return plan;
}

}  // namespace fuseline
