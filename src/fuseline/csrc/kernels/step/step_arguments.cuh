// A whole decoding step (step_kernel.cuh): what its kernel is given, and its sizes.
#pragma once

#include "device/launch.cuh"
#include "plans/decode_step.h"

namespace fuseline {

constexpr int kStepKeys = 384;  // a block takes at once, or a part of it

struct StepArguments {
  StepLayer layers[FUSELINE_STEP_LAYERS];
  StepProduct products[kStepProducts];
  const char *token_table, *position_table;
  const float *cos, *sin;
  const char *norm_weight, *norm_bias, *head_weight;
  int64_t* length;
  int64_t* token;
  char* logits;
  StepBuffers to;
  int64_t head_stride;
  int num_layers, embed_dim, heads, kv_heads, group, head_dim, ffn_dim, window;
  StepLayout layout;
  int norm, activation;
  float eps, scale;  // scale times log2(e)
};

template <int kHeadDim_, int kVectors_>
struct StepShape {
  using Element = __nv_bfloat16;
  static constexpr StepTiles kTiles{kVectors_};
  static constexpr int kHeadDim = kHeadDim_, kVectors = kVectors_, kPiece = kTiles.piece(), kDepth = kTiles.depth();
  static constexpr int kWarps = kTiles.warps(), kThreads = kWarps * kWarp;
  static constexpr int kNormWarps = kTiles.norm_warps(), kNormThreads = kNormWarps * kWarp, kEach = kTiles.normed();
  static constexpr int kSlotBytes = kTiles.slot_bytes(), kRingBytes = kTiles.ring_bytes(), kUnitBytes = kTiles.unit_bytes();
};

}  // namespace fuseline
