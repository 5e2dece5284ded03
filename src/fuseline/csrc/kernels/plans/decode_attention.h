// How the attention of one decoding step is spread over blocks: the one place that decides. attention/decode_attention.cu launches
// what the plan says.
#pragma once

#include "../fuseline_decode.h"
#include "device.h"

namespace fuseline {

constexpr int kDecodeWarps = 4, kDecodeThreads = kDecodeWarps * kWarp;
constexpr int kMostDecodeBlocks = 32;  // that share a context
constexpr int kClustered = 8;          // of them, at most, that read each other's shared memory

struct DecodeAttentionPlan {
  int code = 0;  // why nothing is launched
  const char* reason = "";
  LaunchShape shape;          // blocks that share a context, heads of keys times `parts`, rows
  int heads_a_block = 1, parts = 1, splits = 1;  // query heads of a block, blocks that have those of a key head, and share its keys
  int64_t partials = 0;       // floats of scratch
};

inline DecodeAttentionPlan plan_decode_attention(const fuseline_decode& c, const Device& device) {
  constexpr int64_t kLeastKeys = 32, kShortContext = 1024;  // of a block, where the context is split; positions of a context
  DecodeAttentionPlan plan;
  const auto refuse = [&](int code, const char* reason) { return plan.code = code, plan.reason = reason, plan; };
  if (c.batch < 0 || c.heads < 1 || c.kv_heads < 1 || c.count < 1) return refuse(FUSELINE_BAD_SIZE, "a size is too small");
  const bool same = c.cache == FUSELINE_CACHE_SAME, known = c.dtype >= FUSELINE_FLOAT32 && c.dtype <= FUSELINE_BFLOAT16;
  if ((c.head_dim != 64 && c.head_dim != 128) || c.heads % c.kv_heads || !known || c.cache < FUSELINE_CACHE_SAME ||
      c.cache > FUSELINE_CACHE_FP8 || (!same && c.dtype == FUSELINE_FLOAT32)) {
    return refuse(FUSELINE_UNSUPPORTED, "the kernel takes head dims 64 and 128, and a cache of the dtype, or of 8 bits beside 16");
  }
  const int64_t size = same && c.dtype == FUSELINE_FLOAT32 ? 4 : 8;
  if (c.batch_stride % size || c.head_stride % size || uintptr_t(c.k) % 16 || uintptr_t(c.v) % 16) {
    return refuse(FUSELINE_UNSUPPORTED, "the cache does not begin at a multiple of 16 bytes, or its strides are uneven");
  }
  const int64_t group = c.heads / c.kv_heads;
  plan.heads_a_block = group == 1 ? 1 : 4, plan.parts = int(divide_up(group, plan.heads_a_block));
  if (c.batch > 0xffff || c.kv_heads * plan.parts > 0xffff) return refuse(FUSELINE_UNSUPPORTED, "too many rows or heads");
  const int64_t blocks = c.batch * c.kv_heads * plan.parts, wanted = blocks ? divide_up(2 * device.processors, blocks) : 1;
  const int64_t most = std::min<int64_t>(divide_up(c.count, kLeastKeys), kMostDecodeBlocks);
  plan.splits = int(std::max<int64_t>(1, std::min(wanted, most)));
  // A cluster meets in a third of the time that counting in memory takes, and twice as many blocks do not make up for it.
  // Of long contexts they do: 5 blocks for each of 64 heads took 71 us for 4,000 positions, clusters of 4 80 us.
  const int together = plan.splits >= kClustered ? kClustered : plan.splits > 2 ? 4 : 2;
  const bool clustered = device.clusters && plan.splits > 1 && plan.splits <= 2 * kClustered &&
                         (c.count <= kShortContext || 8 * together >= 7 * plan.splits);
  if (clustered) plan.splits = together;
  plan.shape = {blocks * plan.splits, kDecodeThreads, 1, clustered ? plan.splits : 1, 0};
  plan.reason = plan.splits == 1 ? "there are rows and heads enough: a block has all of a context"
                : clustered      ? "blocks of a cluster share a context and meet in its shared memory"
                                 : "blocks share a long context and meet in memory";
  if (plan.splits > 1 && !clustered) plan.partials = plan.shape.grid * plan.heads_a_block * (c.head_dim + 2);
  return plan;
}

}  // namespace fuseline
