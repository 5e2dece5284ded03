// Which kernel takes the forward of a norm, and how: the one place that decides. norms/norms.cu launches what the plan says,
// and `fuseline explain layer_norm` prints it.
#pragma once

#include "norms.h"
#include "packed.h"
#include "tiles.h"

namespace fuseline {

enum class NormForwardKernel {
  unsupported,  // no kernel
  held,         // registers of a warp, a block or a cluster
  packed,       // registers, as the row came
  few,          // registers, a block a row and a vector a thread
  fetched,      // shared memory, in bulk copies
  tiled,        // short rows at odd addresses, several a copy, through shared memory
  added,        // a 16-bit branch and its fp32 stream, through rings in shared memory
  rows,         // registers, of two dtypes or at any address
  waiting,      // shared memory, filled by each thread for itself
  streamed      // the row is read twice
};

// As profilers show it.
inline const char* name_of(NormForwardKernel kernel) {
  switch (kernel) {
    case NormForwardKernel::held:
      return "norm_forward_held";
    case NormForwardKernel::packed:
      return "norm_forward_packed";
    case NormForwardKernel::few:
      return "norm_forward_few";
    case NormForwardKernel::fetched:
      return "norm_forward_fetched";
    case NormForwardKernel::tiled:
      return "norm_forward_tiled";
    case NormForwardKernel::added:
      return "norm_forward_added";
    case NormForwardKernel::rows:
      return "norm_forward_rows";
    case NormForwardKernel::waiting:
      return "norm_forward_waiting";
    case NormForwardKernel::streamed:
      return "norm_forward_streamed";
    default:
      return "";
  }
}

struct NormForwardProblem {
  int x_size, y_size;    // bytes of an element of what is normalized, and of y
  bool fp16;             // y is of fp16, whose conversions take more registers than bf16's
  int64_t rows, n;
  bool centred;          // a layer norm
  NormOf of;
  bool drops;            // there is a mask
  bool fp32_weights;     // weight or bias have more bits than y
  bool rows_aligned;     // tensors of rows begin at multiples of 16 bytes
  bool weights_aligned;  // and so do weight, bias and x_bias
};

struct NormForwardPlan {
  NormForwardKernel kernel = NormForwardKernel::unsupported;
  const char* reason = "";
  LaunchShape shape;
  int held = 0;           // vectors, or slots, that a thread holds
  bool one_warp = false;  // `held`, `rows`: the threads of a row are of one warp
  bool early = false;     // `held`: four vectors of the weights are fetched together with the row
  int turns = 1;          // `held`: rows that a thread has, one after the other
  bool vectors = false;   // `rows`: they keep to 16-byte steps
  int part = 0;           // `fetched`: vectors of a warp's part of a row; `tiled`: rows of a block
  bool light = false;     // `fetched`: threads have fewer registers
  bool leaves = false;    // `fetched`: x leaves the L2 before what is written
  int stages = 0;         // `added`: rows in a warp's ring
  int64_t turns_of_all = 0;  // `added`: of all groups together; the launcher makes as many blocks stay as the device holds
};

namespace norm_forward_plans {

using namespace norm_plans;

inline int64_t vectors_of(const NormForwardProblem& p) { return p.n / (16 / p.y_size); }
inline bool is_added(const NormForwardProblem& p) { return p.of != NormOf::x; }
inline bool is_masked(const NormForwardProblem& p) { return p.of == NormOf::masked_sum; }
inline int tensors_of(const NormForwardProblem& p) { return is_added(p) ? 2 : 1; }

// ---- rows of one dtype in registers: norm_forward_held.cuh, norm_forward_packed.cuh, norm_forward_few.cuh ----

constexpr int kShortRows = 2;    // a thread has of rows that take one vector of it
constexpr int kMostVectors = 4;  // of a thread; 2 of each tensor where a sum is made on the way
constexpr int kRowsBeside = 4;   // of a block, each with a quarter of the threads
constexpr int kMostEarly = 128;  // threads of a block whose weights, four vectors a thread, come with the row

struct Holding {
  int held = 0;           // vectors a thread holds; 0: rows are not held
  int threads = 0;        // of a block that share a row
  bool one_warp = false;  // has the whole row
  bool early = false;     // of rows in blocks, weights of four vectors are on their way with these
  int beside = 1;         // rows a block has at a time
  int rows = 1;           // and in all
  int cluster = 1;        // blocks share a row
  bool packed = false;    // as it came
};

// As many blocks as hold `vectors`, of `most` threads while there are more, and the threads of each. No vectors held: a
// cluster does not hold them.
inline void share_blocks(Holding& plan, int64_t vectors, bool clusters, int most = kMostThreads) {
  while (clusters && plan.cluster < kMaxCluster && vectors > int64_t(plan.cluster) * most * plan.held) plan.cluster *= 2;
  plan.threads = int(divide_up(divide_up(vectors, plan.held * plan.cluster), kWarp)) * kWarp;
  if (plan.threads > kMostThreads) plan.held = 0;
}

// Whole warps of rows that are a warp's or less, few of them spread over the multiprocessors.
inline void share_warps(Holding& plan, int64_t rows, int block, bool few, const Device& device) {
  plan.one_warp = true;
  plan.threads = power_of_two_from(plan.threads);
  const int a_warp = kWarp / plan.threads;
  const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
  plan.beside = int(std::min<int64_t>(std::max(std::min(block, kMostShortRowBlock), kWarp) / plan.threads, spread));
  plan.rows = plan.beside * (plan.held == 1 && !few ? kShortRows : 1);
}

// Few rows are spread over all threads that there are, one vector each while these last: a warp alone issues instructions
// for longer than warps take to meet. In us, LayerNorm of 128 x 4,096 elements of 16 bits: 512 threads of one vector 2.82, 256
// of two 3.38; clusters of 2 blocks of 256 2.96, of 4 of 128 3.18. Of 4 rows, blocks of 128: 1.68, of 256 1.73, one of 512
// 1.84.
inline bool hold_few(Holding& plan, int64_t rows, int64_t vectors, const Device& device) {
  const int64_t threads = int64_t(device.processors) * 1024;
  if (rows * vectors > 2 * threads) return false;
  const int64_t most = int64_t(device.clusters ? kMaxCluster : 1) * kMostThreads;  // threads of a row
  plan.held = rows * vectors > threads || vectors > most ? 2 : 1;
  if (vectors > kWarp * plan.held) {
    share_blocks(plan, vectors, device.clusters, rows * 4 <= device.processors ? 128 : kMostThreads);
    return plan.held > 0;
  }
  plan.threads = int(divide_up(vectors, plan.held));
  share_warps(plan, rows, kShortRowBlock, true, device);
  return true;
}

// Of x alone: as the table says, but few rows. Those that a warp has without idle lanes are its where a multiprocessor has
// several: 512 x 768 in 2.64 us, in 2.76 with 96 threads a row. The table is for layer norms whose rows are held as fp32: many
// RMS norms of rows that registers can hold read 0.978 in them at 16,384, 0.975 in shared memory; 512 take 16.0 us, and 15.5
// there. Held as they came they read 0.982, and layer norms 0.981, which read 0.963 in shared memory.
inline Holding hold_x(const NormForwardProblem& p, bool may_pack, const Device& device) {
  const int64_t rows = p.rows, vectors = vectors_of(p);
  Holding plan;
  const bool warps = rows > 2 * device.processors && vectors > 2 * kWarp && vectors <= 3 * kWarp;
  const bool given = row_overrides[FUSELINE_LAYER_NORM_FORWARD].given;
  if (!given && !warps && hold_few(plan, rows, vectors, device)) {
    // Rows of four warps each, of which a multiprocessor has three or four, are one block's: 512 x 1,024 RMS norms take
    // 2.62 us in place of 2.77, layer norms 2.73 in place of 2.95; two a block 2.80 and 2.97.
    const bool four = plan.held == 1 && plan.cluster == 1 && plan.threads * kRowsBeside == kMostThreads;
    if (four && rows > 2 * device.processors && rows <= kRowsBeside * device.processors) {
      plan.beside = plan.rows = kRowsBeside;
    }
    return plan;
  }
  plan = {};
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, p.y_size, p.n);
  if (!choice || vectors > int64_t(kMostThreads) * kMostVectors) return plan;
  const bool waits = given || (p.centred && !may_pack) || rows <= kFewNormRows * device.processors;
  if (choice->stages > 0 && device.clusters && waits) return plan;  // in shared memory
  plan.held = std::min(power_of_two_from(choice->held), kMostVectors);
  const int most = vectors > kWarp * plan.held ? kMostThreads : kWarp;
  while (divide_up(vectors, plan.held) > most) plan.held *= 2;
  plan.threads = int(divide_up(vectors, plan.held));
  if (plan.threads > kWarp) {
    share_blocks(plan, vectors, false);
    // Registers for the weights of four vectors, too, in small blocks whose threads all have four: 0.983, 0.985 and 0.988 of
    // the copy bandwidth against 0.971, 0.961 and 0.963 at 2,048, 3,072 and 4,096 elements of 16 bits. At 5,120 0.924 against
    // 0.969, at 8,192 the same; with threads idle, at 1,600, 0.903 against 0.950. Held as they came 0.972, 0.974 and 0.976,
    // where that was 0.976, 0.978 and 0.979. Numbers of fp16 take registers more.
    const int64_t slots = int64_t(plan.threads) * plan.held;
    plan.early = !p.fp16 && plan.held == kMostVectors && plan.threads <= kMostEarly &&
                 (slots - vectors) * 8 <= vectors;
    plan.packed = may_pack && !plan.early && plan.held == kPackedVectors && packs(plan.threads, vectors);
    return plan;
  }
  // Three vectors a thread leave none idle: rows of 384, and of 768.
  if (plan.held > 1 && power_of_two_from(plan.threads) * plan.held * 3 >= vectors * 4) {
    plan.threads = int(divide_up(vectors, 3)), plan.held = 3;
  }
  share_warps(plan, rows, choice->block, false, device);
  return plan;
}

// Rows whose mask idle lanes would make for nothing: three vectors a lane read 0.975 of the copy bandwidth at 768 elements of 16
// bits, 0.853 two in two warps and 0.931 one in three; of layer norms at 384 0.972, 0.913 and 0.722. RMS norms of 384 read 0.990
// with two.
inline bool in_thirds(const NormForwardProblem& p) {
  const int64_t vectors = vectors_of(p);
  return p.drops && (vectors == 3 * kWarp || (p.centred && vectors == 3 * kWarp / 2));
}

// Of a sum: two vectors of each tensor a thread read 0.972, 0.979 and 0.980 of the copy bandwidth at 1,024, 4,096 and 8,192
// elements of 16 bits, one 0.973, 0.889 and less, four 0.975 (of a warp's rows), 0.976 and 0.972. A row of up to 8,192 is a
// block's. Clusters of blocks of 256 threads have longer ones, 0.982 at 16,384 and 0.976 at 32,768, where rows that wait in
// shared memory read 0.971 and 0.964; at 65,536 these read 0.962, blocks of 512 threads 0.953.
inline Holding hold_sum(const NormForwardProblem& p, const Device& device) {
  constexpr int kMostOfSum = 2, kFewer = kMostThreads / 2;  // vectors, and threads
  const int64_t vectors = vectors_of(p);
  // Few masked rows have no ring of copies that reads more.
  const int most = is_masked(p) && vectors > int64_t(kFewer) * kMostOfSum * kMaxCluster ? kMostThreads : kFewer;
  Holding plan;
  if (hold_few(plan, p.rows, vectors, device)) return plan;
  plan = {};
  if (vectors > int64_t(most) * kMostOfSum * kMaxCluster) return plan;
  plan.held = in_thirds(p) ? 3 : vectors <= 8 ? 1 : kMostOfSum;
  if (vectors > kWarp * plan.held) {
    share_blocks(plan, vectors, device.clusters, vectors > int64_t(kMostThreads) * kMostOfSum ? most : kMostThreads);
    return plan;
  }
  plan.threads = int(divide_up(vectors, plan.held));
  share_warps(plan, p.rows, kShortRowBlock, false, device);
  return plan;
}

// The table's layout; no vectors held: there is no kernel for it. A block has as many rows as its threads hold.
inline Holding hold_as(const RowChoice& choice, const NormForwardProblem& p, bool may_pack, const Device& device) {
  Holding plan;
  if (choice.held < 1 || choice.held > kMostVectors || choice.cluster < 1 || choice.cluster > kMaxCluster) return plan;
  const int64_t vectors = vectors_of(p), threads = divide_up(vectors, int64_t(choice.held) * choice.cluster);
  if (threads > kMostThreads) return plan;
  plan.cluster = choice.cluster, plan.early = choice.stages > 0, plan.packed = choice.kernel == RowKernel::packed;
  const bool added = is_added(p);
  if (plan.cluster == 1 && threads <= kWarp) {
    if (plan.packed || (choice.held == 3 && added && !is_masked(p)) || (choice.held == 4 && added)) return plan;
    plan.held = choice.held, plan.threads = int(threads);
    share_warps(plan, p.rows, choice.block, false, device);
    return plan;
  }
  plan.threads = int(divide_up(threads, kWarp)) * kWarp;
  if (plan.cluster == 1) plan.beside = plan.rows = std::max(1, std::min(choice.block, kMostThreads) / plan.threads);
  bool there = choice.held < 3;
  if (choice.held == kMostVectors) {
    const bool fits = !plan.early || (!p.fp16 && plan.threads * plan.beside <= kMostThreads / 2);
    there = plan.cluster == 1 && !added && fits;
  }
  if (plan.packed) {
    there = may_pack && choice.held == kPackedVectors && plan.cluster == 1 && packs(plan.threads, vectors);
    plan.beside = plan.rows = 1;
  }
  if (there) plan.held = choice.held;
  return plan;
}

// Rows of one dtype that keep to 16-byte steps in registers, as the table says (`choice`) or by rules; false if they do not fit.
inline bool plan_held(NormForwardPlan& plan, const NormForwardProblem& p, const RowChoice* choice, const Device& device) {
  if (p.n > kLongestNormRow) return false;
  const bool two_bytes = p.y_size == 2, own_weights = !p.fp32_weights;
  const bool may_pack = two_bytes && !is_added(p) && own_weights;
  const Holding holding = choice         ? hold_as(*choice, p, may_pack, device)
                          : is_added(p) ? hold_sum(p, device)
                                        : hold_x(p, may_pack, device);
  if (holding.held == 0) return false;
  plan.held = holding.held, plan.one_warp = holding.one_warp, plan.early = holding.early;
  plan.turns = holding.rows / holding.beside;
  plan.shape = {divide_up(p.rows, holding.rows) * holding.cluster, holding.threads, holding.beside, holding.cluster, 0};
  const bool alone = !plan.one_warp && holding.cluster == 1 && holding.rows == 1;  // a row is a block
  if (holding.packed) {
    plan.kernel = NormForwardKernel::packed;
    plan.reason = "registers hold the row as it came, two elements in each";
    plan.shape = {p.rows, holding.threads, 1, 1, 0};
  } else if (two_bytes && !is_masked(p) && own_weights && alone && plan.held == 1 && !plan.early) {
    plan.kernel = NormForwardKernel::few;
    plan.reason = "each thread has one vector of the row, and no step of it has a branch";
  } else {
    plan.kernel = NormForwardKernel::held;
    plan.reason = plan.one_warp             ? "registers of a warp, or of a part of one, hold the row"
                  : holding.cluster > 1 ? "registers of the blocks of a cluster hold the row"
                                            : "registers of a block hold the row";
  }
  return true;
}

// ---- rows of one dtype in bulk copies: norm_forward_fetched.cuh, norm_forward_tiled.cuh ----

constexpr int64_t kLongestTiledNorm = 256;  // elements of rows in tiles: of longer ones a thread has too many
constexpr int64_t kMostFewVectors = 2048;   // of rows, of which there are few, whose blocks are small
constexpr int kMostLightWarps = 8;          // of a block of few registers
constexpr int kMostMaskedWarps = 8;         // of a block that makes masks, too: registers leave room for three of them
constexpr int64_t kLongSum = 131072, kLongestSum = 262144;  // elements of 16 bits, between which sums have blocks of their own
constexpr int64_t kFetchedBarriers = 8 * (kMostThreads / kWarp * kPieces + 1);  // bytes of a block

struct Fetching {
  int cluster = 1, warps = 0;  // blocks of a row, and warps of a block; no warps: none holds it
  int part = 0;                // vectors of a warp's part of each tensor
  size_t bytes = 0;
  bool light = false;          // threads have fewer registers
  bool leaves = false;         // x leaves the L2 first
};

// Of rows of 16 bits with a mask, and of many of fp32 by their bytes, as lines of the table are for x alone: a warp has two
// pieces of a row, or one. Shares of the copy bandwidth at 12,288 elements 0.946 (0.840 by twice the warps; in registers
// 0.934), at 16,384 0.979 (0.967 by half of them; 0.945), 32,768 0.960 (0.936 by twice the blocks, 0.935 the warps; 0.930),
// 65,536 0.948 (0.912 by twice the warps; 0.898), 131,072 0.923 (0.911 by half the blocks of twice the warps), 262,144 0.864
// (0.587 by half the warps).
constexpr RowChoice kMaskedForward2[] = {{15360, Rules{8, 128, 1, 1}},  {16384, Rules{8, 256, 1, 1}},  {32768, Rules{8, 128, 2, 1}},
                                         {65536, Rules{16, 128, 4, 1}}, {131072, Rules{16, 128, 8, 1}}, {262144, Rules{16, 256, 8, 1}}};

inline const RowChoice* masked_choice(int64_t n) {
  if (row_overrides[FUSELINE_LAYER_NORM_FORWARD].given) return &row_overrides[FUSELINE_LAYER_NORM_FORWARD].choice;
  for (const RowChoice& choice : kMaskedForward2) {
    if (n <= choice.longest) return &choice;
  }
  return nullptr;
}

// The warps' parts and a block's memory; no warps left if that is too much.
inline void share_parts(Fetching& plan, const NormForwardProblem& p, const Device& device) {
  const int64_t warps = int64_t(plan.cluster) * plan.warps;
  plan.part = int(divide_up(divide_up(vectors_of(p), warps), 8) * 8);
  plan.bytes = size_t(plan.warps) * (size_t(plan.part) * tensors_of(p) * 16 + plan.cluster * kMomentsBytes);
  if (plan.part > kPartSlots || plan.bytes > size_t(device.shared_a_block - kFetchedBarriers)) plan.warps = 0;
}

// For blocks of `most_warps` warps at most. The table is for a layer norm of x alone: a sum has as many bytes a block. At 65,536
// elements of 16 bits twice the blocks read 0.954 against 0.948 in an RMS norm, 0.938 against 0.947 in a layer norm. Sums of
// more than kLongSum, not masked, take 383.2 us at 262,144 of RMS norms in 8 blocks of 16 warps and 405.5 of layer norms in 16
// of 8, by the table 413.7 and 423.8; in 16 of 8 RMS norms 388.4, in 16 of 16 477.2 and layer norms 509.2.
inline Fetching fetch_by_rules(const RowChoice& choice, const NormForwardProblem& p, bool may_be_light, int most_warps, int most,
                               const Device& device) {
  const int tensors = tensors_of(p);
  const int64_t vectors = vectors_of(p);
  Fetching plan;
  plan.cluster = choice.cluster * tensors;
  plan.warps = std::min(choice.block / kWarp, most_warps);
  if (tensors == 1 && !p.centred && plan.cluster == 4) plan.cluster *= 2;
  const bool given = row_overrides[FUSELINE_LAYER_NORM_FORWARD].given;
  plan.cluster = std::min(plan.cluster, most);
  // Few rows have more blocks each, and more warps.
  while (plan.cluster < kMaxCluster && p.rows * plan.cluster * 2 <= device.processors) plan.cluster *= 2;
  if (p.rows * plan.cluster <= device.processors) plan.warps = most_warps;
  // Of a few rows a multiprocessor that are not long, as few warps as hold them: 512 x 16,384 elements of 16 bits in 15.3 us,
  // 16.2 by four a block; RMS norms in 14.7 if x leaves the L2 before what is written. At 32,768 the eight of the table take
  // 29.0, two 37.2; at 65,536 four 51.6, two 55.8.
  const bool few = p.rows > device.processors && p.rows <= kFewNormRows * device.processors && vectors <= kMostFewVectors;
  if (!given && tensors == 1 && few) plan.warps = 2, plan.leaves = !p.centred && may_be_light;
  const bool long_sum = p.y_size == 2 && p.of == NormOf::sum && p.n > kLongSum && p.n <= kLongestSum;
  if (!given && long_sum && p.rows > device.processors) {
    plan.cluster = p.centred ? most : kMaxCluster, plan.warps = p.centred ? 8 : 16;
  }
  const auto part = [&] { return divide_up(divide_up(vectors, plan.cluster * plan.warps), 8) * 8; };
  while (plan.warps * 2 <= most_warps && part() > kPartSlots) plan.warps *= 2;
  share_parts(plan, p, device);
  return plan;
}

// The table's layout; no warps: no block holds it.
inline Fetching fetch_as(const RowChoice& choice, const NormForwardProblem& p, bool may_be_light, int most_warps,
                         const Device& device) {
  Fetching plan;
  plan.cluster = choice.cluster, plan.light = choice.kernel == RowKernel::light, plan.leaves = choice.stages == 2;
  const int warps = choice.block / kWarp;
  if (plan.cluster < 1 || plan.cluster > kMostBlocks || warps < 1 || warps > most_warps || choice.held > 0) return plan;
  if (plan.light && !(may_be_light && warps <= kMostLightWarps && warps * plan.cluster <= kWarp)) return plan;
  plan.warps = warps;
  share_parts(plan, p, device);
  return plan;
}

inline bool plan_fetched(NormForwardPlan& plan, const NormForwardProblem& p, const RowChoice* table, const NormGrants& grants,
                         const Device& device) {
  if (!device.clusters || p.n > kLongestNormRow) return false;
  const bool may_be_light = p.y_size == 2 && !is_added(p) && !p.fp32_weights;
  const int most_warps = is_masked(p) ? kMostMaskedWarps : kMostThreads / kWarp;
  Fetching fetching;
  if (table) {
    fetching = fetch_as(*table, p, may_be_light, most_warps, device);
    if (fetching.cluster > kMaxCluster && !grants.large_clusters) return false;
  } else {
    const bool as_masked = is_masked(p) && (p.y_size == 2 || p.rows > device.processors);
    const RowChoice* choice = as_masked ? masked_choice(p.n * p.y_size / 2) : nullptr;
    if (!choice && !(is_masked(p) && p.y_size == 2)) choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, p.y_size, p.n);
    if (!choice || choice->stages == 0) return false;
    fetching = fetch_by_rules(*choice, p, may_be_light, most_warps, grants.large_clusters ? kMostBlocks : kMaxCluster, device);
  }
  if (fetching.warps == 0) return false;
  plan.kernel = NormForwardKernel::fetched;
  plan.reason = fetching.cluster > 1 ? "the row waits in the shared memory of a cluster's blocks"
                                     : "the row waits in a block's shared memory";
  plan.part = fetching.part, plan.light = fetching.light, plan.leaves = fetching.leaves;
  plan.shape = {p.rows * fetching.cluster, fetching.warps * kWarp, 1, fetching.cluster, fetching.bytes};
  return true;
}

inline bool plan_tiled(NormForwardPlan& plan, const NormForwardProblem& p, const Device& device) {
  if (!p.rows_aligned || p.n > kLongestTiledNorm) return false;
  Tiling tiles = plan_tiles(p.y_size, p.rows, p.n, 0, tensors_of(p), device);
  if (tiles.threads == 0) return false;
  if (is_masked(p)) tiles.bytes += size_t(divide_up(tiles.rows * p.n, 8));
  plan.kernel = NormForwardKernel::tiled, plan.part = tiles.rows, plan.shape = shape_of(tiles);
  plan.reason = "rows are short and do not keep to 16-byte steps: neighbors of them are whole vectors";
  return true;
}

// ---- a residual of fp32 and x of 16 bits: norm_forward_added.cuh ----

constexpr int kAddedHeld = 4;       // slots of a row that a thread has
constexpr int kAddedThreads = 256;  // of a block; two of them share a multiprocessor,
constexpr int kAddedMost = 512;     // but for rows that take more
constexpr int kAddedStages = 4;     // rows in a warp's ring, at most
constexpr int kMeetingsOfAdded = 4;

// Blocks, or clusters, that have so many turns where the device holds `count` at once.
inline int64_t blocks_of_added(int64_t turns, int64_t count) {
  constexpr int64_t kRowsEach = 8;  // of a group: with more, those multiprocessors that are slower hold up the end
  return std::max(divide_up(turns, kRowsEach), std::min(count, turns));
}

inline bool plan_added(NormForwardPlan& plan, const NormForwardProblem& p, const NormGrants& grants, const Device& device) {
  constexpr int kSize = 8, kColumns = kAddedHeld * kWarp * kSize, kBytes = kColumns * 6;  // of a warp's part of a row
  constexpr int kLeastVectors = 64;  // a warp has more than one slot a thread
  constexpr int kWarps = kAddedThreads / kWarp;
  if (!device.clusters || p.n % kSize != 0 || p.n < kLeastVectors * kSize || p.n > kLongestNormRow) return false;
  if (!p.rows_aligned || !p.weights_aligned) return false;
  // A cluster for each longer row reads 0.87 of the copy bandwidth at 16,384, blocks that end with their rows 0.90, and
  // with a mask 0.69.
  const int64_t warps = divide_up(p.n, kColumns);
  if (warps > (p.drops ? kMostBlocks * kWarps : kWarps)) return false;
  if (p.rows * p.n < int64_t(device.processors) * 8 * kColumns) return false;
  int cluster = 1;
  const int most = warps <= kAddedMost / kWarp ? kAddedMost / kWarp : kWarps;
  while (warps > cluster * most) cluster *= 2;
  if (cluster > kMaxCluster && !grants.large_clusters) return false;
  const int each = int(divide_up(warps, cluster));
  const int groups = cluster > 1 ? 1 : std::max(1, kWarps / each);
  const int64_t stage = int64_t(groups) * each * kBytes;
  const int64_t states = kMeetingsOfAdded * int64_t(groups) * cluster * each * kMomentsBytes;
  const auto stages_in = [&](int64_t room) { return int(std::min<int64_t>(kAddedStages, (room - states) / stage)); };
  plan.stages = each > kWarps ? 0 : stages_in(device.shared_a_processor / 2 - 2048);
  if (plan.stages < 3) plan.stages = stages_in(device.shared_a_block - 1024);  // then a multiprocessor has one block
  if (plan.stages < 3) return false;
  plan.kernel = NormForwardKernel::added;
  plan.reason = "the stream is fp32 and its branch has 16 bits: rows run ahead through rings in shared memory";
  plan.turns_of_all = divide_up(p.rows, groups);
  const int64_t blocks = blocks_of_added(plan.turns_of_all, std::max(1, device.processors / cluster));
  plan.shape = {blocks * cluster, each * kWarp, groups, cluster, size_t(plan.stages * stage + states)};
  return true;
}

// ---- rows of two dtypes, or at any address: norm_forward_rows.cuh, norm_forward_long.cuh ----

// Slots that a thread of a block that ends with its row holds: registers for them leave room for 1024 threads a
// multiprocessor. A half and a quarter of it are there for short rows, a quarter for few.
inline int most_slots(const NormForwardProblem& p) { return (p.y_size == 4 ? 8 : 4) / tensors_of(p); }
inline int least_slots(const NormForwardProblem& p) { return std::max(1, most_slots(p) / 4); }

// Threads of how many blocks share a row that waits in shared memory, of `parts` parts of so many bytes: no threads if no
// cluster holds it.
inline void share_waiting(NormForwardPlan& plan, int64_t rows, int64_t parts, int bytes, const Device& device) {
  constexpr int64_t kBeside = kMomentsBytes * 2 * kMaxStates + 64 + 1024;  // of a block, and the system's part
  int cluster = 1;
  const int64_t vectors = divide_up(parts * bytes, 16);
  const auto blocks_for = [&] {
    const int64_t part = divide_up(vectors, cluster) * 16;
    return part > device.shared_a_block - kBeside ? int64_t(0) : device.shared_a_processor / (part + kBeside);
  };
  while (device.clusters && cluster < kMaxCluster && blocks_for() < 2) cluster *= 2;
  const int64_t blocks = std::min<int64_t>(blocks_for(), 8);
  if (blocks == 0) return;
  const int64_t of_block = divide_up(vectors, cluster);
  const int64_t most = std::min<int64_t>(kMostThreads, 1024 / blocks / kWarp * kWarp);
  int threads = int(std::min<int64_t>(most, std::max<int64_t>(2 * kWarp, divide_up(of_block, kWarp) * kWarp)));
  if (of_block > int64_t(threads) * kPiece * kPieces) return;
  const auto each = [&] { return divide_up(parts, cluster); };
  if (rows < device.processors) {  // few rows: more blocks for each, and more threads
    while (device.clusters && cluster < kMaxCluster && rows * cluster * 2 <= device.processors && each() >= 2 * kMostThreads) {
      cluster *= 2;
    }
    threads = int(std::min<int64_t>(kMostThreads, divide_up(each(), kWarp) * kWarp));
  }
  plan.shape = {rows * cluster, threads, 1, cluster, size_t(each() * bytes)};
}

inline void plan_long(NormForwardPlan& plan, const NormForwardProblem& p, const Device& device) {
  const int64_t size = 16 / p.x_size, parts = divide_up(p.n + size - 1, size);
  if (p.n <= kLongestNormRow) share_waiting(plan, p.rows, parts, 16 + (is_added(p) ? int(size) * p.y_size : 0), device);
  if (plan.shape.grid > 0) {
    plan.kernel = NormForwardKernel::waiting;
    plan.reason = "no other kernel takes rows of this length, dtypes and addresses: each thread copies what it will read";
    return;
  }
  int cluster = 1;
  while (device.clusters && cluster < kMaxCluster && parts > int64_t(cluster) * kMostThreads * kPiece) cluster *= 2;
  plan.kernel = NormForwardKernel::streamed;
  plan.reason = "no shared memory holds the row: it is read twice";
  plan.shape = {p.rows * cluster, kMostThreads, 1, cluster, 0};
}

inline void plan_any(NormForwardPlan& plan, const NormForwardProblem& p, const Device& device) {
  const int size = 16 / p.y_size, most = most_slots(p), least = least_slots(p);
  plan.vectors = p.x_size != p.y_size && p.n % size == 0 && p.rows_aligned && p.weights_aligned;
  // The table is for rows of one dtype. What a thread holds is counted in slots, those of y; rows of x that the table does
  // not know, or that have rows ahead there, wait in shared memory.
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, p.y_size, p.n);
  const RowChoice* const of_bytes = choice_for(FUSELINE_LAYER_NORM_FORWARD, p.x_size, p.n);
  const int64_t slots = plan.vectors ? p.n / size : divide_up(p.n + size - 1, size);
  const bool one_warp = slots <= kWarp * most;
  constexpr int64_t kRegisters = int64_t(kMostThreads) * 4 * 16;  // bytes of a row that a block's registers hold
  const bool waits = !of_bytes || (of_bytes->stages > 0 && (plan.vectors || p.n * p.x_size > kRegisters));
  if (slots > int64_t(kMostThreads) * most || (waits && !one_warp)) return plan_long(plan, p, device);
  plan.kernel = NormForwardKernel::rows;
  plan.reason = plan.vectors ? "x and y have different dtypes, and registers hold the row"
                             : "a tensor or its rows do not begin at 16 bytes, and registers hold the row";
  // Few rows: each is spread over more threads, so that all multiprocessors have some.
  const bool few = p.rows * slots <= int64_t(device.processors) * 2048 * least;
  plan.one_warp = one_warp && !(few && plan.vectors && slots > kWarp * least);
  plan.held = most;
  if (plan.one_warp) {
    if (plan.vectors) {
      plan.held = few ? least : std::max(least, std::min(most, choice ? power_of_two_from(choice->held) : most));
      while (plan.held * kWarp < slots) plan.held *= 2;
    }
    const int threads = power_of_two_from(divide_up(slots, plan.held)), a_warp = kWarp / threads;
    const int64_t spread = divide_up(divide_up(p.rows, device.processors), a_warp) * a_warp;
    const int beside = int(std::min<int64_t>(kShortRowBlock / threads, spread));
    plan.shape = {divide_up(p.rows, beside), threads, beside, 1, 0};
    return;
  }
  if (few && plan.vectors && slots <= int64_t(kMostThreads) * least) plan.held = least;
  plan.shape = {p.rows, int(divide_up(divide_up(slots, plan.held), kWarp)) * kWarp, 1, 1, 0};
}

}  // namespace norm_forward_plans

inline NormForwardPlan plan_norm_forward(const NormForwardProblem& p, const Device& device, const NormGrants& grants = {}) {
  using namespace norm_forward_plans;
  // Elements from which rows with a mask are copied in bulk, since clusters' registers read less; fp32 by then 0.981 and 0.979
  // of the copy bandwidth in place of 0.933 and 0.947.
  const int64_t shortest_copied = p.y_size == 4 ? 32768 : 12288;
  NormForwardPlan plan;
  const bool same = p.x_size == p.y_size;
  const bool vectors = same && p.n % (16 / p.y_size) == 0 && p.rows_aligned && p.weights_aligned;
  const RowChoice* const choice =
      vectors ? choice_for_many(p.of, p.centred, false, p.y_size, p.rows, p.n, device) : nullptr;
  if (choice) {
    const bool copied = choice->kernel == RowKernel::copied || choice->kernel == RowKernel::light;
    const bool held = choice->kernel == RowKernel::held || choice->kernel == RowKernel::packed;
    if (held && plan_held(plan, p, choice, device)) return plan;
    if (copied && plan_fetched(plan, p, choice, grants, device)) return plan;
    if (is_measured(choice)) return plan;
  }
  const bool copies_first = p.drops && p.n >= shortest_copied && p.rows > kFewNormRows * device.processors;
  if (vectors && copies_first && plan_fetched(plan, p, nullptr, grants, device)) return plan;
  if (vectors && plan_held(plan, p, nullptr, device)) return plan;
  if (vectors && !copies_first && plan_fetched(plan, p, nullptr, grants, device)) return plan;
  if (same && plan_tiled(plan, p, device)) return plan;
  if (!same && is_added(p) && plan_added(plan, p, grants, device)) return plan;
  plan_any(plan, p, device);
  return plan;
}

}  // namespace fuseline
