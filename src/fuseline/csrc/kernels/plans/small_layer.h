// Which kernels compute a small self-attention layer, and how: the one place that decides. layer/ launches what the plan says, in
// its order, and `fuseline explain self_attention_layer` prints it. Plans read a layer's record; they follow none of its pointers.
#pragma once

#include <initializer_list>

#include "small_layer_tiles.h"

namespace fuseline {

enum class SmallLayerKernel {
  forward,         // all in one launch
  heads, out,      // in two, that fill the GPU and overlap
  heads_backward,  // the gradients of q, k and v
  sum_heads,       // of keys and values that heads share
  remaining        // the products that remain
};

// As profilers show it.
inline const char* name_of(SmallLayerKernel kernel) {
  constexpr const char* kNames[] = {"small_layer_forward",        "small_layer_heads",     "small_layer_out",
                                    "small_layer_heads_backward", "small_layer_sum_heads", "small_layer_remaining"};
  return kNames[int(kernel)];
}

struct SmallLayerLaunch {
  SmallLayerKernel kernel;
  LaunchShape shape;
  small_layer::ChunkTiles tiles{};  // of heads and out; of other kernels the rows of a block alone
};

struct SmallLayerPlan {
  int code = 0;  // the answer where nothing is launched: 0, or why not
  const char* reason = "";
  size_t workspace = 0;  // of the backward: grad_qkv and grad_kv together
  int count = 0;
  SmallLayerLaunch launches[3];
  int heads_each = 1;  // of forward: heads that a block has at a time
  small_layer::ForwardLayout forward{};
  small_layer::HeadsLayout heads{};
  small_layer::OutLayout out{};
  int remaining[5] = {};  // blocks for the gradients of x, of both weights and of both biases

  const SmallLayerLaunch* begin() const { return launches; }
  const SmallLayerLaunch* end() const { return launches + count; }
  void add(const SmallLayerLaunch& launch) { launches[count++] = launch; }
};

namespace small_layer {

inline SmallLayerPlan refuse(const char* reason, int code = FUSELINE_UNSUPPORTED) {
  SmallLayerPlan plan;
  plan.code = code, plan.reason = reason;
  return plan;
}

constexpr const char* kTooLarge = "the blocks need more shared memory than the GPU has";
constexpr const char* kUneven = "a pointer is no multiple of 16 bytes";

// Of fp32 without tensor cores so many rows are the composition's: 166 us, where torch's own product and attention take 83.
constexpr int kMostExactRows = 64;
constexpr int kMostExactRowsInOne = 32;  // launch; no model has more of them that are so small
constexpr int kMostRows = 128;

// Why the kernels do not take a layer; null if they do.
inline const char* refusal(const fuseline_small_layer& a, const Device& device) {
  constexpr int64_t kWidestHead = 128, kMostTokens = 1 << 20;
  if (!device.clusters) return "the kernels meet in clusters of blocks, which the GPU does not have";
  if (a.dtype != FUSELINE_FLOAT32 && a.dtype != FUSELINE_BFLOAT16) return "no model has small layers of this dtype";
  const int64_t unit = a.dtype == FUSELINE_FLOAT32 ? 8 : 16;  // of a head, in one product of a warp
  const bool heads = a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0 && a.head_dim % unit == 0 && a.head_dim <= kWidestHead;
  const bool widths = a.embed_dim % 8 == 0 && a.out_dim % 8 == 0;
  const bool shared = a.num_kv_heads == a.num_heads && a.embed_dim == a.num_heads * a.head_dim;
  if (!heads || !widths || (a.shared_projection && !shared)) return "the kernels do not take such heads or widths";
  if (a.seqlen > kMostRows || tokens_of(a) > kMostTokens) return "the tokens are more than the kernels take";
  return is_exact(a) && a.seqlen > kMostExactRows ? "fp32 without TF32 is faster by torch for so many rows" : nullptr;
}

// The smallest size of a layer, of which a kernel needs one.
inline int64_t least_size(const fuseline_small_layer& a) {
  return std::min({a.batch, a.seqlen, a.embed_dim, a.num_heads, a.head_dim, a.out_dim});
}

inline bool are_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* at) { return uintptr_t(at) % 16 == 0; });
}

// A second launch keeps the host busy for 2.5 us, which are hidden where one launch takes more than about 12. Bytes of x from
// which two launches are faster, of 16 bits and of fp32: 8 x 64 x 256 in bf16 takes 11.0 us in one and 8.5 in two.
template <class Captured>
bool pays_for_two(const fuseline_small_layer& a, const Captured& captured) {
  constexpr int64_t kLeast16 = 384 << 10, kLeast32 = 192 << 10, kLeastCaptured = 64 << 10;
  const int64_t bytes = tokens_of(a) * a.embed_dim * element_size(a);
  return bytes >= (element_size(a) == 4 ? kLeast32 : kLeast16) || (bytes >= kLeastCaptured && captured());
}

// Whether heads of this size come in clusters, and whether lines of x and the weight may be fetched in chunks.
inline bool comes_in_clusters(const fuseline_small_layer& a) {
  const int64_t D = a.head_dim;
  if (D != 16 && D != 32 && D != 64) return false;
  const int64_t each = kHeadsWidth / D;
  if (a.num_heads % each != 0 || (each > 1 && a.num_kv_heads != a.num_heads)) return false;
  return !a.shared_projection || D == kHeadsWidth;
}

// Adds the first of two launches if there is one for the layer. Blocks of a cluster by measurement: 8 x (64, 256) in bf16 and
// TF32 8.1 and 13.0 us with two, 9.0 and 14.4 with four, which send each other more; without tensor cores, and at 8 x (16, 512)
// in TF32, the product itself wants more of them.
template <class Residents>
bool plan_heads(SmallLayerPlan& plan, const fuseline_small_layer& a, const Device& device, const Residents& residents) {
  const bool exact = is_exact(a), warpgroups = device.warpgroups && !exact && a.seqlen > 32;
  const int size = element_size(a), blocks = warpgroups ? 2 : 4, rows = a.seqlen <= 32 ? 32 : a.seqlen <= 64 ? 64 : 128;
  if (!comes_in_clusters(a) || (rows > 32 && !exact && !warpgroups)) return false;
  SmallLayerLaunch launch{SmallLayerKernel::heads, {}, heads_tiles(rows, blocks, exact, warpgroups)};
  const ChunkTiles& tiles = launch.tiles;
  HeadsLayout by{};
  const int64_t k = a.shared_projection ? a.head_dim : a.embed_dim;
  by.chunks = int(divide_up(k * size, kLineBytes));
  by.head_dim_log2 = log2_of(a.head_dim);
  by.seqlen_log2 = std::max(4, log2_of(a.seqlen));
  by.batches_log2 = log2_of(rows) - by.seqlen_log2;
  const int tasks = 6 - by.head_dim_log2 + log2_of(rows) - 4;  // log2, of a row group
  by.tasks_log2 = std::max(0, tasks - log2_of(blocks));
  by.parts_log2 = std::max(0, by.seqlen_log2 - log2_of(heads_keys(rows)));

  const int units = 1 << (by.tasks_log2 + by.parts_log2);
  const int partial_bytes = units * 16 * ((int(a.head_dim) + 8) * 4 + 8);
  const int behind = kMostRingStages * 16 + 16 + tiles.columns * 4, tile_bytes = heads_tile_bytes(rows, size);
  // Clusters of four find room for all at once only if two blocks fit a multiprocessor.
  const int most = blocks >= 4 ? std::min(device.shared_a_block, device.shared_a_processor / 2 - 1024) : device.shared_a_block;
  by.stages = tiles.stages(by.chunks, most - behind - (heads_reuse(rows) ? 0 : tile_bytes));
  if (by.stages == 0) return false;
  int used = std::max(by.stages * tiles.stage_bytes(), tiles.sum_bytes() + partial_bytes);
  by.partials = tiles.sum_bytes(), by.tile = used;
  if (heads_reuse(rows)) {
    // What is read past the last row of v is not written meanwhile.
    by.tile = tiles.sum_bytes(), by.partials = by.tile + tile_bytes + (a.head_dim < kHeadsWidth ? kReadPast : 0);
    used = std::max(used, by.partials + partial_bytes);
  } else {
    used += tile_bytes;
  }
  by.barriers = used, by.biases = used + kMostRingStages * 16 + 16;
  const int64_t groups = divide_up(a.batch, int64_t(1) << by.batches_log2), head_groups = a.num_heads * a.head_dim / kHeadsWidth;
  launch.shape = {blocks * head_groups * groups, kBlock, 1, blocks, size_t(used + behind)};
  if (launch.shape.shared > size_t(device.shared_a_block)) return false;
  if (heads_share(rows, warpgroups) && by.stages == by.chunks && groups % 2 == 0) {
    SmallLayerLaunch pairs = launch;
    pairs.shape.cluster *= 2;
    by.groups_log2 = residents(pairs) >= std::min<int64_t>(residents(launch) / 2, head_groups * groups / 2);
    if (by.groups_log2) launch = pairs;
  }
  plan.heads = by, plan.add(launch);
  return true;
}

// The largest tiles of which there are enough for most multiprocessors.
inline const ChunkTiles& out_tiles(const fuseline_small_layer& a, const Device& device) {
  const auto enough = [&](const ChunkTiles& tiles) {
    return divide_up(tokens_of(a), tiles.rows) * divide_up(a.out_dim, tiles.columns) * 4 >= 3 * device.processors;
  };
  if (is_exact(a)) {  // for which shared memory is read too often with few rows
    return enough(kOutLarge) ? kOutLarge : enough(kOutSquare) ? kOutSquare : kOutSmall;
  }
  if (device.warpgroups && enough(kOutByWarpgroups)) return kOutByWarpgroups;
  return enough(kOutFlat) ? kOutFlat : kOutSmall;
}

inline bool plan_out(SmallLayerPlan& plan, const fuseline_small_layer& a, const Device& device) {
  const ChunkTiles& tiles = out_tiles(a, device);
  const int behind = kMostRingStages * 16 + tiles.columns * 4;
  OutLayout& by = plan.out;
  by.chunks = int(divide_up(a.num_heads * a.head_dim * element_size(a), kLineBytes));
  by.stages = tiles.stages(by.chunks, device.shared_a_block - behind);
  by.barriers = std::max(by.stages * tiles.stage_bytes(), tiles.sum_bytes());
  const int64_t grid = divide_up(a.out_dim, tiles.columns) * divide_up(tokens_of(a), tiles.rows);
  plan.add({SmallLayerKernel::out, {grid, kBlock, 1, 1, size_t(by.barriers + behind)}, tiles});
  return by.stages > 0;
}

// A cluster has a batch element, and its blocks the heads.
inline SmallLayerPlan plan_one_launch(const fuseline_small_layer& a, const Device& device) {
  SmallLayerPlan plan;
  plan.reason = "so small that one launch, a cluster for each sequence, takes no longer than two";
  const int64_t H = a.num_heads;
  const int rows = a.seqlen <= 16 ? 16 : a.seqlen <= 32 ? 32 : a.seqlen <= 64 ? 64 : 128;
  plan.heads_each = a.shared_projection ? 1 : int(std::max<int64_t>(1, std::min(H, 64 / a.head_dim)));
  while (H % plan.heads_each != 0) --plan.heads_each;
  int blocks = 1;
  while (blocks * 2 <= std::min<int64_t>(H / plan.heads_each, kMaxCluster)) blocks *= 2;
  const int most = device.shared_a_block - kForwardTables;
  plan.forward = forward_layout(a, rows, plan.heads_each, most);
  if (plan.forward.bytes > size_t(most)) return refuse(kTooLarge);
  plan.add({SmallLayerKernel::forward, {a.batch * blocks, kBlock, 1, blocks, plan.forward.bytes}, {rows}});
  return plan;
}

}  // namespace small_layer

// `captured()`: whether the launches go into a graph. `residents` answers how many clusters of a launch the device holds at once.
template <class Captured, class Residents>
SmallLayerPlan plan_small_layer_forward(const fuseline_small_layer& a, const Device& device, const Captured& captured,
                                        const Residents& residents) {
  using namespace small_layer;
  if (least_size(a) < 0) return refuse("a size is negative", FUSELINE_BAD_SIZE);
  if (a.batch == 0 || a.seqlen == 0) return refuse("there is nothing to compute", 0);
  if (least_size(a) == 0) return refuse("a width is 0");
  if (const char* const reason = refusal(a, device)) return refuse(reason);
  if (!are_aligned({a.x, a.qkv_weight, a.out_weight, a.qkv, a.attended, a.out})) return refuse(kUneven);
  const bool takes_two = is_exact(a) && a.seqlen > kMostExactRowsInOne;
  if (takes_two || pays_for_two(a, captured)) {
    SmallLayerPlan plan;
    plan.reason = takes_two ? "fp32 without TF32 takes so many rows in two launches"
                            : "large enough for two launches, which fill the GPU and overlap";
    if (plan_heads(plan, a, device, residents) && plan_out(plan, a, device)) return plan;
  }
  return takes_two ? refuse("fp32 without TF32 takes so many rows in two launches, which do not take such heads")
                   : plan_one_launch(a, device);
}

// Of a layer alone, without gradients (all null), what a block has of its heads.
inline SmallLayerPlan plan_small_layer_backward(const fuseline_small_layer& a, const fuseline_small_layer_gradients& g,
                                                const Device& device) {
  using namespace small_layer;
  if (least_size(a) < 0) return refuse("a size is negative", FUSELINE_BAD_SIZE);
  if (least_size(a) == 0) return refuse("there is nothing to compute");
  if (const char* const reason = refusal(a, device)) return refuse(reason);
  if (!are_aligned({a.x, a.qkv_weight, a.out_weight, a.qkv, a.attended, g.grad_out, g.grad_qkv, g.grad_kv, g.grad_x,
                    g.grad_qkv_weight, g.grad_out_weight})) {
    return refuse(kUneven);
  }
  const int size = element_size(a), rows = a.seqlen <= 16 ? 16 : a.seqlen <= 64 ? 64 : 128;
  const int64_t tokens = tokens_of(a), attended = a.num_heads * a.head_dim;
  const bool grouped = a.num_heads != a.num_kv_heads;
  if (grouped && g.grad_qkv && !g.grad_kv) return refuse("grad_kv is missing, which heads that share keys need");
  SmallLayerPlan plan;
  plan.reason = "a block has a head of a sequence, and other blocks the products that remain";
  plan.workspace = size_t(tokens * (projected_of(a) + (grouped ? 2 * attended : 0)) * size);
  const size_t shared = head_bytes(rows, size, a.head_dim);
  if (shared > size_t(device.shared_a_block)) return refuse(kTooLarge);
  plan.add({SmallLayerKernel::heads_backward, {a.batch * a.num_heads, kBlock, 1, 1, shared}, {rows}});
  if (grouped) {
    const int64_t vectors = tokens * 2 * a.num_kv_heads * (a.head_dim * size / 16);
    plan.add({SmallLayerKernel::sum_heads, {divide_up(vectors, kBlock), kBlock, 1, 1, 0}});
  }
  // A projection that the heads share sees a token of head_dim elements for each head of a token.
  const int64_t seen = a.shared_projection ? tokens * a.num_heads : tokens, in = a.shared_projection ? a.head_dim : a.embed_dim;
  const int64_t projected = a.shared_projection ? 3 * a.head_dim : projected_of(a);
  const auto tiles = [](const void* wanted, int64_t rows, int64_t columns) {
    return wanted ? int(divide_up(rows, kSide) * divide_up(columns, kSide)) : 0;
  };
  const auto sums = [](const void* wanted, int64_t columns) { return wanted ? int(divide_up(columns, kSumColumns)) : 0; };
  const int blocks[] = {tiles(g.grad_x, seen, in), tiles(g.grad_qkv_weight, projected, in),
                        tiles(g.grad_out_weight, a.out_dim, attended), sums(g.grad_qkv_bias, projected),
                        sums(g.grad_out_bias, a.out_dim)};
  int64_t all = 0;
  for (int i = 0; i < 5; ++i) all += plan.remaining[i] = blocks[i];
  if (all > 0) plan.add({SmallLayerKernel::remaining, {all, kBlock, 1, 1, size_t(kRemainingBytes)}, {kSide}});
  return plan;
}

// What `residents` is without a GPU to ask: a block a multiprocessor, wherever those of a cluster lie.
struct EstimatedSmallLayers {
  const Device& device;

  int operator()(const SmallLayerLaunch& launch) const { return estimated_clusters(1, launch.shape, device); }
};

}  // namespace fuseline
