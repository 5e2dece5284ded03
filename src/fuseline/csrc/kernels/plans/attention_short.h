// Attention over short sequences: which problems its kernels take, by which tiles, in how much memory.
#pragma once

#include <cstdlib>

#include "attention_tiles.h"

namespace fuseline::short_attention {

constexpr int kLongest = 128, kWidest = 128;  // a problem's rows and keys, its head dim
constexpr int kPackedWarps = 64;  // packed sequences of up to this have products of warps; longer ones those of warpgroups alone
constexpr int kTurnBytes = 16;    // what a block knows of its turns

// What lies in a block's shared memory. In the backward, problems of 128 x 128 have one room for p and grad_s, in turn, and a
// second place for queries, and for grad_out where shared memory allows, so that the next problem's are on their way throughout:
// their blocks are too few for one to compute while another waits. Problems of 64 x 32 have both second places too. Measured:
// 363 us with them, 378 without, 367 with that for queries alone in six blocks, 369 without any in six, and with both in four.
constexpr bool one_room(int length) { return length == 128; }
constexpr bool queries_ahead(int length, int width) { return one_room(length) || (length == 64 && width == 32); }
constexpr bool gradients_ahead(int length, int width) {
  return (one_room(length) && width != 64) || (length == 64 && width == 32);
}
constexpr int block_bytes(int length) { return length == kLongest ? length / 16 * 8 : 0; }  // of what blocks are hidden
// Forward problems whose tensors have a second place each, so that the next one's are on their way throughout, and whose
// copies ask the L2 for the other heads' rows beside theirs, of 64 bytes in lines of 256. Measured: at 32 x 32 223 us with
// both, 233 with the lines alone, 236 with neither, at 16 x 32 232, 240, 244; at 64 x 32 the places gain nothing, and the
// lines lose 11 of 195 us. In the backward they lose 5 of 348 at 32 x 32 and gain 5 of 454 at 16 x 32.
constexpr bool forward_ahead(int length, int width) { return length <= 32 && width == 32; }
constexpr int forward_bytes(int length, int width) {
  return (forward_ahead(length, width) ? 6 : 3) * length * width * 2 + kTurnBytes + block_bytes(length);
}
constexpr int backward_bytes(int length, int width) {
  return (4 + queries_ahead(length, width) + gradients_ahead(length, width)) * length * width * 2 +
         (one_room(length) ? 1 : 2) * length * length * 2 + kTurnBytes + block_bytes(length);
}

// The kernel's tiles and what it does, for a call that fits.
struct Form {
  int length, width, shared;  // of tiles: rows and keys, head dim; bytes of a block
  bool warpgroups;
  bool skips;      // of a longest problem, blocks of 16 x 16 that are hidden as a whole are left out
  bool counts;     // blocks take problems by the counter, if there is one
  size_t counter;  // its bytes, where problems are many to a block
  size_t grouped;  // of one gradient like k for every query head, where several share a head of keys
};

inline int longest(const fuseline_attention& c) {
  return int(c.cu_seqlens_q ? std::max(c.max_seqlen_q, c.max_seqlen_k) : std::max(c.seqlen_q, c.seqlen_k));
}

inline Form form_of(const fuseline_attention& c, bool backward, const Device& device) {
  constexpr int64_t kFewTurns = 4, kRowsAtOnce = 256;  // of queries, on a multiprocessor
  const bool packed = c.cu_seqlens_q != nullptr;
  Form form{packed ? kPackedWarps : 16, 32};
  while (form.length < longest(c)) form.length *= 2;
  while (form.width < c.head_dim) form.width *= 2;
  form.shared = backward ? backward_bytes(form.length, form.width) : forward_bytes(form.length, form.width);
  form.warpgroups = form.length == kLongest && device.warpgroups;  // with fewer rows and keys a warpgroup would be half idle
  const bool bounded = c.window_left >= 0 || c.causal != FUSELINE_CAUSAL_NONE || c.window_right >= 0;
  form.skips = form.length == kLongest && !packed && (bounded || std::min(c.seqlen_q, c.seqlen_k) <= kLongest - 16);
  // Of smaller problems there are so many that they wait for the counter. Measured: forward at 16 x 64 203 us with it and 189
  // without, at 32 x 64 183 and 189; backward at 16 x 32 186 and 173, at 16 x 64 343 and 354.
  form.counts = form.warpgroups || form.length * form.width >= (backward ? 1024 : 2048);
  const int64_t rows = (packed ? c.sequences : c.batch) * c.heads * longest(c);
  form.counter = rows >= kFewTurns * kRowsAtOnce * device.processors ? 16 : 0;
  form.grouped = backward && c.heads != c.kv_heads ? size_t(c.batch * c.heads * c.seqlen_k * c.head_dim) * 2 : 0;
  return form;
}

// Whether packed sequences are of a kind that these kernels take.
inline bool packs(const fuseline_attention& c, const Device& device) {
  constexpr int64_t kMostRows = int64_t(1) << 30;
  return c.cu_seqlens_q && c.cu_seqlens_k && c.batch == 1 && c.sequences >= 1 && c.mask_kind == FUSELINE_MASK_NONE &&
         c.seqlen_q <= kMostRows && c.seqlen_k <= kMostRows && (device.warpgroups || longest(c) <= kPackedWarps);
}

// bf16, or fp16 where there is no Hopper, whose general kernels have it; both lengths 1 .. 128, head dims 8 .. 128 by 8, a
// positive scale, no soft cap or sinks.
inline bool fits(const fuseline_attention& c, bool backward, const Device& device) {
  constexpr int64_t kMostMaskStep = 1 << 20, kMostProblems = int64_t(1) << 30;  // the first: elements from key to key
  const bool packed = c.cu_seqlens_q || c.cu_seqlens_k;
  if (packed && !packs(c, device)) return false;
  const auto length = [](int64_t rows) { return rows >= 1 && rows <= kLongest; };
  const bool lengths = length(packed ? c.max_seqlen_q : c.seqlen_q) && length(packed ? c.max_seqlen_k : c.seqlen_k);
  const bool dtype = c.dtype == FUSELINE_BFLOAT16 || (c.dtype == FUSELINE_FLOAT16 && !device.warpgroups);
  const bool head_dim = c.head_dim >= 8 && c.head_dim <= kWidest && c.head_dim % 8 == 0;
  const bool problems = c.batch >= 1 && c.heads >= 1 && c.kv_heads >= 1 && c.heads % c.kv_heads == 0 &&
                        (packed ? c.sequences : c.batch) <= kMostProblems / c.heads;
  const bool mask = c.mask_kind == FUSELINE_MASK_NONE ||
                    (c.mask_kind <= FUSELINE_MASK_ADD_FP32 && std::abs(c.mask_strides[3]) <= kMostMaskStep);
  const bool plain = c.soft_cap == 0 && !c.sinks && c.softmax_scale > 0;
  return dtype && lengths && head_dim && problems && mask && plain &&
         form_of(c, backward, device).shared <= device.shared_a_block;
}

}  // namespace fuseline::short_attention
