// Which kernel computes a whole decoding step in one launch, how its products are cut, and where everything lies: the one place
// that decides. step/decode_step.cu launches what the plan says. Plans read a call's record; they follow none of its pointers.
#pragma once

#include <iterator>
#include <type_traits>

#include "../fuseline_decode_step.h"
#include "device.h"

namespace fuseline {

enum StepProducts { kQkv = 0, kOut = 1, kUp = 2, kDown = 3, kHead = 4, kStepProducts = 5 };

struct StepProduct {
  int rows, k, parts;  // SwiGLU has two parts of as many rows
  int pieces, spread;  // of a row, and warps that share one
};

struct StepLayer {
  const char* weights[4];
  const char *norm_weight, *norm_bias, *mlp_norm_weight, *mlp_norm_bias;
  const char *qkv_bias, *out_bias, *up_bias, *down_bias;
  char *k, *v;
};

// What a warp has of a product: the first of its pieces, and how it goes on. Worked out once, since divisions cost more than
// the products do.
struct StepUnit {
  uint32_t offset, stride;  // bytes from the weight's start, and from a row of the warp's to its next
  int rows, columns;        // of the warp; from its first column on
  int group, together;      // the warp's place among those that have rows of their own, and how many these are
  int spread, first;        // warps that share a row, and this one's place among them
  int mine, pieces;         // rows of the block; pieces of a row that one warp takes one after the other
  uint32_t part_bytes;      // to SwiGLU's other row, or 0
};

constexpr int kMostStepSplits = 8;  // blocks that share a head's positions

// A kernel's blocks, by the 16-byte vectors of a weight's row that a lane takes at once.
struct StepTiles {
  int vectors;

  constexpr int piece() const { return vectors * kWarp * 8; }  // elements, which a warp takes at once
  // GPT-2's products have 6 rows of 1 or 4 pieces, 18 and 24 of 1 to a block: each is one turn of 24 warps.
  constexpr int warps() const { return vectors == 3 ? 24 : 16; }
  constexpr int depth() const { return vectors == 3 ? 5 : 4; }  // pieces under way: 180 KB, 128 KB
  // Few warps norm the stream: what each does beside its elements is most of the work, and the others wait for it.
  static constexpr int norm_warps() { return 8; }
  constexpr int normed() const { return vectors == 3 ? 3 : 8; }  // elements of the stream a thread norms
  constexpr int slot_bytes() const { return piece() * 2; }
  constexpr int ring_bytes() const { return warps() * depth() * slot_bytes(); }
  constexpr int unit_bytes() const { return kStepProducts * warps() * int(sizeof(StepUnit)); }
};

struct StepLayout {
  int embed_room, heads_room, ffn_room;  // elements, whole pieces
  int at_biases, at_stream, at_x, at_gathered, at_inner;  // in shared memory, behind the ring and the layers
  int blocks;
  int biases_at[4], biases;  // of a product among those of a layer that a block holds, and of all
};

// Words that blocks hand to each other, in the workspace: a float with 32 bits of its layer's number, or 16 bits of bf16 and 16
// of the number, which are all written anew in each layer, so that what stood there before has another number.
struct StepBuffers {
  unsigned int* steps;              // before this one
  uint64_t *from_heads, *from_mlp;  // the stream after each half of a layer
  uint64_t *gathered, *lse;         // of heads, for each split
  uint32_t *qkv, *inner;
  uint64_t* likeliest;              // token of each block's, with its logit
};

struct StepPlan {
  int code = 0;  // why nothing is launched
  const char* reason = "one launch: its blocks stay for the whole step and fetch weights ahead";
  LaunchShape shape;
  int vectors = 0;
  StepProduct products[kStepProducts] = {};
  StepLayout layout{};
  int64_t workspace = 0;  // bytes
};

namespace step_plans {

// Why no kernel takes a call, or null. `code` is FUSELINE_BAD_SIZE for negative sizes.
inline const char* refusal(const fuseline_step& c, const Device& device, int& code) {
  const int64_t sizes[] = {c.num_layers, c.embed_dim, c.heads, c.kv_heads, c.head_dim, c.ffn_dim, c.vocab_size};
  const auto [least, most] = std::minmax_element(std::begin(sizes), std::end(sizes));
  code = *least < 0 ? FUSELINE_BAD_SIZE : FUSELINE_UNSUPPORTED;
  if (*least <= 0 || *most > 0xffffff) return "a size is less than 1, or more than the kernel takes";
  if (!device.clusters) return "the kernel was written for GPUs of compute capability 9.0 and later";
  if (c.dtype != FUSELINE_BFLOAT16) return "the kernel takes weights in bf16, which the models are in";
  if (c.num_layers > FUSELINE_STEP_LAYERS) return "there are more layers than one launch takes";
  if (c.heads % c.kv_heads || (c.head_dim != 64 && c.head_dim != 128)) return "the kernel takes head dims 64 and 128";
  const int64_t widest = std::max({2 * c.ffn_dim, c.vocab_size, (c.heads + 2 * c.kv_heads) * c.head_dim});
  if (widest * std::max(c.embed_dim, c.ffn_dim) >= int64_t(1) << 31) return "a weight is too large for offsets of 32 bits";
  if (c.embed_dim % 8 || c.ffn_dim % 8 || c.head_stride % 8) return "a width is no multiple of 8 elements";
  const bool known = (c.norm == FUSELINE_NORM_RMS || c.norm == FUSELINE_NORM_LAYER) &&
                     c.activation >= FUSELINE_ACTIVATION_GELU && c.activation <= FUSELINE_ACTIVATION_SWIGLU;
  if (!known) return "the kernel does not know this norm or activation";
  uintptr_t addresses = uintptr_t(c.head_weight) | uintptr_t(c.workspace);
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const fuseline_step_layer& w = c.layers[i];
    const void* const read[] = {w.qkv_weight, w.out_weight, w.up_weight, w.down_weight, w.k, w.v};
    for (const void* const at : read) addresses |= uintptr_t(at);
  }
  return addresses % 16 ? "a pointer is no multiple of 16 bytes" : nullptr;
}

// Cuts the products for kernels of so many vectors; false if a row has more pieces than a block has warps, or a block too little
// room.
inline bool cut(StepPlan& plan, const fuseline_step& c, int vectors, const Device& device) {
  constexpr int kStatic = 17 * 1024;  // of shared memory, at most
  const StepTiles tiles{vectors};
  StepLayout& by = plan.layout;
  by.blocks = device.processors;  // of which each has a row of each product
  for (const StepProduct& of : plan.products) by.blocks = std::min(by.blocks, of.rows);
  by.biases = 0;
  for (int i = 0; i < kHead; ++i) {
    by.biases_at[i] = by.biases;
    by.biases += plan.products[i].parts * int(divide_up(plan.products[i].rows, by.blocks));
  }
  by.biases = int(divide_up(by.biases, 4)) * 4;
  bool fits = c.embed_dim <= tiles.normed() * tiles.norm_warps() * kWarp;
  for (int i = 0; i < kStepProducts; ++i) {
    StepProduct& of = plan.products[i];
    of.pieces = int(divide_up(of.k, tiles.piece()));
    of.spread = i == kHead ? 1 : of.pieces;
    fits = fits && of.pieces <= tiles.warps();
  }
  by.embed_room = plan.products[kQkv].pieces * tiles.piece();
  by.heads_room = plan.products[kOut].pieces * tiles.piece();
  by.ffn_room = plan.products[kDown].pieces * tiles.piece();
  const int layers = int(c.num_layers);
  by.at_biases = tiles.ring_bytes() + tiles.unit_bytes() + layers * int(sizeof(StepLayer));
  by.at_stream = by.at_biases + layers * by.biases * 4;
  by.at_x = by.at_stream + by.embed_room * 4;
  by.at_gathered = by.at_x + by.embed_room * 2;
  by.at_inner = by.at_gathered + by.heads_room * 2;
  plan.vectors = vectors;
  plan.shape = {by.blocks, tiles.warps() * kWarp, 1, 1, size_t(by.at_inner + by.ffn_room * 2)};
  return fits && int64_t(plan.shape.shared) + kStatic <= device.shared_a_block;
}

}  // namespace step_plans

// Where words stand from `at` on; answers the bytes that they take.
inline int64_t place_buffers(StepBuffers& to, char* at, const fuseline_step& c, const StepPlan& plan) {
  const char* const begin = at;
  const auto take = [&](auto*& here, int64_t bytes) {
    here = reinterpret_cast<std::remove_reference_t<decltype(here)>>(at);
    at += divide_up(bytes, 128) * 128;
  };
  take(to.steps, 16);
  take(to.from_heads, c.embed_dim * 8);
  take(to.from_mlp, c.embed_dim * 8);
  take(to.gathered, c.heads * c.head_dim * kMostStepSplits * 8);
  take(to.lse, c.heads * kMostStepSplits * 8);
  take(to.qkv, int64_t(plan.products[kQkv].rows) * 4);
  take(to.inner, c.ffn_dim * 4);
  take(to.likeliest, int64_t(plan.layout.blocks) * 8);
  return at - begin;
}

inline StepPlan plan_decode_step(const fuseline_step& c, const Device& device) {
  using namespace step_plans;
  StepPlan plan;
  const char* const refused = refusal(c, device, plan.code);
  if (refused) return plan.reason = refused, plan;
  const int width = int(c.embed_dim), gathered = int(c.heads * c.head_dim), inner = int(c.ffn_dim);
  plan.products[kQkv] = {int((c.heads + 2 * c.kv_heads) * c.head_dim), width, 1, 0, 0};
  plan.products[kOut] = {width, gathered, 1, 0, 0};
  plan.products[kUp] = {inner, width, c.activation == FUSELINE_ACTIVATION_SWIGLU ? 2 : 1, 0, 0};
  plan.products[kDown] = {width, inner, 1, 0, 0};
  plan.products[kHead] = {int(c.vocab_size), width, 1, 0, 0};
  // Pieces of 768 or of 1,024 elements: those that leave less of embed_dim's last one empty.
  const auto room = [&](int vectors) { return divide_up(width, StepTiles{vectors}.piece()) * StepTiles{vectors}.piece(); };
  if ((room(3) > room(4) || !cut(plan, c, 3, device)) && !cut(plan, c, 4, device)) {
    StepPlan none;
    none.code = FUSELINE_UNSUPPORTED;
    none.reason = "a row of a weight is too long, or the layers need more shared memory than a block has";
    return none;
  }
  StepBuffers buffers;
  plan.code = 0, plan.workspace = place_buffers(buffers, nullptr, c, plan);
  return plan;
}

}  // namespace fuseline
