// Which kernel takes the forward of a norm, and how: the one place that decides. norms/norms.cu launches what the plan says,
// and `fuseline explain layer_norm` prints it.
#pragma once

#include "norm_forward_held.h"

namespace fuseline {
namespace norm_forward_plans {

// ---- rows of one dtype in bulk copies: norm_forward_fetched.cu ----

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
constexpr RowChoice kMaskedForward2[] = {
    {15360, Rules{8, 128, 1, 1}},  {16384, Rules{8, 256, 1, 1}},   {32768, Rules{8, 128, 2, 1}},
    {65536, Rules{16, 128, 4, 1}}, {131072, Rules{16, 128, 8, 1}}, {262144, Rules{16, 256, 8, 1}},
};

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
  if (!device.clusters || p.n > kLongestNormRow || (p.fp16 && is_added(p))) return false;
  const bool may_be_light = p.y_size == 2 && !p.fp16 && !is_added(p) && !p.fp32_weights;
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

// ---- a residual of fp32 and x of 16 bits: norm_forward_added.cu ----

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
// multiprocessor. Short rows and few have one, but of fp16.
inline int most_slots(const NormForwardProblem& p, bool vectors) {
  return (p.y_size == 4 ? 8 : 4) / (vectors ? tensors_of(p) : 2);
}

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
  if (p.n <= kLongestNormRow && !p.fp16) share_waiting(plan, p.rows, parts, 16 + (is_added(p) ? int(size) * p.y_size : 0), device);
  if (plan.shape.grid > 0) {
    plan.kernel = NormForwardKernel::waiting;
    plan.reason = "no other kernel takes rows of this length, dtypes and addresses: each thread copies what it will read";
    return;
  }
  int cluster = 1;
  while (device.clusters && cluster < kMaxCluster && parts > int64_t(cluster) * kMostThreads * kPiece) cluster *= 2;
  plan.kernel = NormForwardKernel::streamed;
  plan.reason = p.fp16 ? "long rows of fp16 have one kernel: they are read twice"
                       : "no shared memory holds the row: it is read twice";
  plan.shape = {p.rows * cluster, kMostThreads, 1, cluster, 0};
}

inline void plan_any(NormForwardPlan& plan, const NormForwardProblem& p, const Device& device) {
  const int size = 16 / p.y_size;
  plan.vectors = p.x_size != p.y_size && p.n % size == 0 && p.rows_aligned && p.weights_aligned;
  const int most = most_slots(p, plan.vectors), least = p.fp16 ? most : 1;
  // The table is for rows of one dtype. What a thread holds is counted in slots, those of y; rows of x that the table does
  // not know, or that have rows ahead there, wait in shared memory.
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
  const bool few = p.rows * slots <= int64_t(device.processors) * 2048;
  plan.one_warp = one_warp && !(few && plan.vectors && slots > kWarp * least);
  plan.held = most;
  if (plan.one_warp) {
    if (plan.vectors && (few || slots <= (is_added(p) ? 8 : kWarp))) plan.held = least;
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
  if (!same && is_added(p) && plan_added(plan, p, grants, device)) return plan;
  plan_any(plan, p, device);
  return plan;
}

}  // namespace fuseline
