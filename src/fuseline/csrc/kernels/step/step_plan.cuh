// A whole decoding step (step_kernel.cuh): what its kernel is given, and how its products are cut.
#pragma once

#include "fuseline_decode_step.h"
#include "device/launch.cuh"

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

constexpr int kMostStepSplits = 8;  // blocks that share a head's positions
constexpr int kStepKeys = 384;      // a block takes at once, or a part of it

// Words that blocks hand to each other, in the workspace: a float with 32 bits of its layer's number, or 16 bits of T and 16
// of the number, which are all written anew in each layer, so that what stood there before has another number.
struct StepBuffers {
  unsigned int* steps;              // before this one
  uint64_t *from_heads, *from_mlp;  // the stream after each half of a layer
  uint64_t *gathered, *lse;         // of heads, for each split
  uint32_t *qkv, *inner;
  uint64_t* likeliest;              // token of each block's, with its logit
};

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
  int embed_room, heads_room, ffn_room;  // elements, whole pieces
  int at_biases, at_stream, at_x, at_gathered, at_inner;  // in shared memory, behind the ring and the layers
  int blocks;
  int biases_at[4], biases;  // of a product among those of a layer that a block holds, and of all
  int norm, activation;
  float eps, scale;  // scale times log2(e)

  // How products are cut into pieces of so many elements; false if a row has more pieces than a block has warps.
  __host__ bool plan(int piece, int warps, int processors) {
    bool fits = true;
    blocks = processors;  // of which each has a row of each product
    for (const StepProduct& of : products) blocks = std::min(blocks, of.rows);
    biases = 0;
    for (int i = 0; i < kHead; ++i) {
      biases_at[i] = biases;
      biases += products[i].parts * int(divide_up(products[i].rows, blocks));
    }
    biases = int(divide_up(biases, 4)) * 4;
    for (int i = 0; i < kStepProducts; ++i) {
      products[i].pieces = int(divide_up(products[i].k, piece));
      products[i].spread = i == kHead ? 1 : products[i].pieces;
      fits = fits && products[i].pieces <= warps;
    }
    embed_room = products[kQkv].pieces * piece;
    heads_room = products[kOut].pieces * piece;
    ffn_room = products[kDown].pieces * piece;
    return fits;
  }

  // Where words stand from `at` on; answers the bytes that they take.
  __host__ int64_t place(char* at) {
    const char* const begin = at;
    const auto take = [&](int64_t bytes) {
      char* const here = at;
      at += divide_up(bytes, 128) * 128;
      return here;
    };
    to.steps = reinterpret_cast<unsigned int*>(take(16));
    to.from_heads = reinterpret_cast<uint64_t*>(take(int64_t(embed_dim) * 8));
    to.from_mlp = reinterpret_cast<uint64_t*>(take(int64_t(embed_dim) * 8));
    to.gathered = reinterpret_cast<uint64_t*>(take(int64_t(heads) * head_dim * kMostStepSplits * 8));
    to.lse = reinterpret_cast<uint64_t*>(take(int64_t(heads) * kMostStepSplits * 8));
    to.qkv = reinterpret_cast<uint32_t*>(take(int64_t(products[kQkv].rows) * 4));
    to.inner = reinterpret_cast<uint32_t*>(take(int64_t(ffn_dim) * 4));
    to.likeliest = reinterpret_cast<uint64_t*>(take(int64_t(blocks) * 8));  // the last: blocks may not be known yet
    return at - begin;
  }
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

template <class T, int kHeadDim_, int kVectors_>
struct StepShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_, kVectors = kVectors_;
  static constexpr int kPiece = kVectors * kWarp * 8;
  // GPT-2's products have 6 rows of 1 or 4 pieces, 18 and 24 of 1 to a block: each is one turn of 24 warps.
  static constexpr int kWarps = kVectors == 3 ? 24 : 16, kThreads = kWarps * kWarp;
  static constexpr int kDepth = kVectors == 3 ? 5 : 4;  // pieces under way: 180 KB, 128 KB
  // Few warps norm the stream: what each does beside its elements is most of the work, and the others wait for it.
  static constexpr int kNormWarps = 8, kNormThreads = kNormWarps * kWarp;
  static constexpr int kEach = kVectors == 3 ? 3 : 8;  // elements of the stream a thread norms
  static constexpr int kSlotBytes = kPiece * 2;
  static constexpr int kRingBytes = kWarps * kDepth * kSlotBytes;
  static constexpr int kUnitBytes = kStepProducts * kWarps * int(sizeof(StepUnit));
  static constexpr int kStatic = 17 * 1024;  // of shared memory, at most

  // Bytes of shared memory beside what is static.
  static int lay_out(StepArguments& a) {
    a.at_biases = kRingBytes + kUnitBytes + a.num_layers * int(sizeof(StepLayer));
    a.at_stream = a.at_biases + a.num_layers * a.biases * 4;
    a.at_x = a.at_stream + a.embed_room * 4;
    a.at_gathered = a.at_x + a.embed_room * 2;
    a.at_inner = a.at_gathered + a.heads_room * 2;
    return a.at_inner + a.ffn_room * 2;
  }
};

template <class Shape>
bool shape_fits(StepArguments& a, const Device& device) {
  return device.clusters && a.plan(Shape::kPiece, Shape::kWarps, device.processors) && a.embed_dim <= Shape::kEach * Shape::kNormThreads &&
         Shape::lay_out(a) + Shape::kStatic <= device.shared_a_block;
}

// Calls run(Shape{}) with the shape for this model and device.
template <class T, int kHeadDim, class Run>
int with_pieces(StepArguments& a, const Device& device, const Run& run) {
  // Pieces of 768 or of 1,024 elements: those that leave less of embed_dim's last one empty.
  using Three = StepShape<T, kHeadDim, 3>;
  using Four = StepShape<T, kHeadDim, 4>;
  const bool three = divide_up(a.embed_dim, Three::kPiece) * Three::kPiece <= divide_up(a.embed_dim, Four::kPiece) * Four::kPiece;
  if (three && shape_fits<Three>(a, device)) return run(Three{});
  if (shape_fits<Four>(a, device)) return run(Four{});
  return FUSELINE_UNSUPPORTED;
}

// The same for heads of 64 and of 128.
template <class T, class Run>
int with_shape(StepArguments& a, const Device& device, const Run& run) {
  return a.head_dim == 64 ? with_pieces<T, 64>(a, device, run) : with_pieces<T, 128>(a, device, run);
}

}  // namespace fuseline
