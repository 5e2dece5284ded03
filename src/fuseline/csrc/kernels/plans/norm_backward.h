// Which kernel takes the backward of a norm, and how: the one place that decides. norms/norms.cu launches what the plan says,
// and `fuseline explain layer_norm` prints it.
#pragma once

#include "norms.h"

namespace fuseline {

enum class NormBackwardKernel {
  apart,      // few and short rows: some blocks have rows, others columns
  few,        // few rows: a cluster has columns of all of them
  tiled,      // short rows, several a copy, through shared memory
  tiled_odd,  // the same at odd addresses
  ring,       // rows ahead in shared memory, by blocks that stay
  held,       // registers, by blocks that stay
  general,    // any rows
  unsupported
};

// As profilers show it.
inline const char* name_of(NormBackwardKernel kernel) {
  switch (kernel) {
    case NormBackwardKernel::apart:
      return "norm_backward_apart";
    case NormBackwardKernel::few:
      return "norm_backward_few";
    case NormBackwardKernel::tiled:
    case NormBackwardKernel::tiled_odd:
      return "norm_backward_tiled";
    case NormBackwardKernel::ring:
      return "norm_backward_ring";
    case NormBackwardKernel::held:
      return "norm_backward_held";
    case NormBackwardKernel::general:
      return "norm_backward_general";
    default:
      return "";
  }
}

// How many sums over rows a kernel makes: of an RMS norm weight's, of a layer norm bias's too, of more x_bias's as well.
constexpr int kSumsOfRmsNorm = 1, kSumsOfLayerNorm = 2, kSumsOfAddedNorm = 3;

struct NormBackwardProblem {
  int x_size, y_size;    // bytes of an element of what was normalized, and of grad_y
  int64_t rows, n;
  bool centred;          // a layer norm
  bool drops;            // there is a mask
  bool weighted;         // there is a weight
  bool fp32_weights;     // weights and their gradients are fp32
  bool rows_aligned;     // tensors of rows begin at multiples of 16 bytes
  bool weight_aligned;   // and so does weight
  bool grad_sum;         // there is a gradient of the sum
  bool grad_x, grad_dropped, grad_weight, grad_bias, grad_x_bias;  // are wanted
  bool over_inputs;      // grad_x or grad_dropped stand where x or grad_y do

  bool wants_rows() const { return grad_x || grad_dropped || grad_x_bias; }
  bool wants_sums() const { return grad_weight || grad_bias || grad_x_bias; }
  // Of the kernels that take it.
  int sums() const {
    const bool added = grad_sum || grad_dropped || grad_x_bias || (!centred && grad_bias);
    return added ? kSumsOfAddedNorm : centred ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  }
};

// What a block of the kernel of few rows has in shared memory, and where: bytes from its beginning.
struct FewNormRoom {
  int turns, parts, warps;  // rows of a thread, vectors it holds of each, warps side by side in a row
  int terms, columns, states, sums, statistics, bytes;
};

struct NormBackwardPlan {
  NormBackwardKernel kernel = NormBackwardKernel::unsupported;
  const char* reason = "";
  LaunchShape shape;      // of `ring` and `held` with the most blocks: the launcher makes no more than the device holds
  size_t workspace = 0;   // bytes
  int sums = 0;           // over rows, which the kernel makes
  int slots = 0;          // vectors of grad_y that a thread has of a row
  int blocks = 0;         // with partial sums of their own, a cluster counting once; 0: there are none
  int kinds = 0;          // of partial sums that a second kernel adds up
  int stages = 0;         // `ring`, `tiled`: rows or tiles in the ring
  bool neighbors = false; // `ring`: a cluster has rows beside each other
  int width = 0;          // `few`: vectors of a row that a block has
  int across = 0;         // `few`, `apart`: threads side by side in a row
  int rows = 0;           // `few`: of a cluster
  FewNormRoom room{};     // `few`
  int abreast = 0;        // `apart`: vectors of a row that a block of columns has
  int column_blocks = 0;  // `apart`, `general`: that have the sums
  int sum_column_blocks = 0;  // `apart`: of a second launch, for the sums of x_bias's gradient
  int shares = 0;         // `general`: blocks that share the rows of a column
};

namespace norm_backward_plans {

using namespace norm_plans;

inline int64_t columns_of_partials(int64_t n) { return (n + 3) / 4 * 4; }
inline bool is_added(const NormBackwardProblem& p) { return p.sums() == kSumsOfAddedNorm; }
inline bool is_mixed(const NormBackwardProblem& p) { return p.x_size > p.y_size; }
inline bool is_wide(const NormBackwardProblem& p) { return is_added(p) || is_mixed(p); }
inline int64_t vectors_of(const NormBackwardProblem& p) { return divide_up(p.n, 16 / p.y_size); }
inline bool in_vectors(const NormBackwardProblem& p) {
  return p.n % (16 / p.y_size) == 0 && p.rows_aligned && p.weight_aligned;
}

// Partial sums of `blocks` blocks, which a second kernel adds up.
inline void leave_sums(NormBackwardPlan& plan, const NormBackwardProblem& p, int kinds, int64_t blocks) {
  if (!p.wants_sums()) return;
  plan.blocks = int(blocks), plan.kinds = kinds;
  plan.workspace = size_t(kinds * blocks * columns_of_partials(p.n)) * sizeof(float);
}

// ---- few rows: norm_backward_apart.cuh, norm_backward_few.cuh ----

constexpr int64_t kMostFewRows = 512;
constexpr int kApartThreads = 256, kFewThreads = 512;  // of a block
constexpr int64_t kBlockElements = 6144;  // more are divided between blocks, of a cluster,
constexpr int64_t kLeastVectors = 4;      // as long as each has so many of a row
// Of one cluster: more have several, though these take a second kernel (128 x 16,384: 12.6 us; in one, 32 rows take 11.0).
constexpr int64_t kMostClusterRows = 48, kMostClusterElements = 1 << 18;
// What several launches do better: many short rows (512 x 768: 7 us, a cluster 22), and much of long ones.
constexpr int64_t kShortRow = 2048, kMostShortRows = 32, kMostElements = 1 << 22;

// Rows that a block of kApartThreads holds, by blocks of rows and of columns.
inline bool plan_apart(NormBackwardPlan& plan, const NormBackwardProblem& p, const Device& device) {
  const int size = 16 / p.y_size, some_slots = 16 / size, most_slots = 2 * some_slots;
  constexpr int kLeastAbreast = 4;
  const int64_t vectors = p.n / size;
  if (vectors > most_slots * kApartThreads || !in_vectors(p)) return false;
  // What x_bias's gradient is the sum of, as it is stored: not where the sum has more digits than that.
  const bool dropped = p.grad_dropped || (!is_mixed(p) && !p.drops && p.grad_x);
  if (p.grad_x_bias && (!dropped || (p.fp32_weights && p.y_size < 4))) return false;
  if (p.over_inputs) return false;  // what others still read is not written
  const bool at_once = p.rows * vectors <= int64_t(device.processors) * 2 * kApartThreads;
  plan.slots = vectors <= kApartThreads && at_once ? 1 : vectors <= some_slots * kApartThreads ? some_slots : most_slots;
  const int64_t threads = divide_up(vectors, plan.slots);
  plan.across = threads <= kWarp ? power_of_two_from(threads) : int(divide_up(threads, kWarp)) * kWarp;
  // A thread has two rows of a column, or more where all blocks have as few columns as a read is worth.
  plan.abreast = kWarp;
  while (plan.abreast > kLeastAbreast && p.rows > 2 * kApartThreads / plan.abreast) plan.abreast /= 2;
  const int column_blocks = int(divide_up(vectors, plan.abreast));
  if (p.grad_weight || p.grad_bias) plan.column_blocks = column_blocks;
  if (p.grad_x_bias) plan.sum_column_blocks = column_blocks;
  const int64_t row_blocks = p.wants_rows() ? divide_up(p.rows, kApartThreads / plan.across) : 0;
  plan.kernel = NormBackwardKernel::apart;
  plan.reason = "the rows are few and short: some blocks have rows, others sum columns, and none waits for another";
  plan.shape = {plan.column_blocks + row_blocks, kApartThreads, 1, 1, 0};
  return true;
}

inline FewNormRoom room_of_few(const NormBackwardProblem& p, int rows, int threads, int across, int cluster) {
  const int size = 16 / p.y_size, x_vectors = p.x_size / p.y_size;
  FewNormRoom room;
  room.turns = int(divide_up(rows, threads / across));
  room.parts = x_vectors * (p.grad_sum ? 2 : 1) + 1;
  room.warps = across > kWarp ? across / kWarp : 1;
  room.terms = room.turns * room.parts * threads * 16;
  room.columns = room.terms + rows * 16;
  room.states = room.columns + threads * size * 4;
  room.sums = room.states + rows * cluster * 8;
  room.statistics = room.sums + rows * room.warps * 8;
  room.bytes = room.statistics + rows * 8;
  return room;
}

inline bool plan_few(NormBackwardPlan& plan, const NormBackwardProblem& p, const NormGrants& grants, const Device& device) {
  if (!in_vectors(p) || p.rows * p.n > kMostElements) return false;
  if (p.n <= kShortRow && p.rows > kMostShortRows) return false;
  const int most = !device.clusters ? 1 : kMostBlocks;
  const int64_t vectors = vectors_of(p);
  int cluster = 1, clusters = 1, threads = 0;
  const auto width = [&] { return divide_up(vectors, cluster); };
  while (cluster < most && (width() > kFewThreads || (p.rows * p.n > cluster * kBlockElements && width() >= 2 * kLeastVectors))) {
    cluster *= 2;
  }
  if (width() > kFewThreads || (cluster > kMaxCluster && !grants.large_clusters)) return false;
  plan.width = int(width());
  plan.across = plan.width <= kWarp ? power_of_two_from(plan.width) : int(divide_up(plan.width, kWarp)) * kWarp;
  const auto fits = [&] {
    plan.rows = int(divide_up(p.rows, clusters));
    const int beside = std::max(1, kWarp / plan.across);  // rows of a warp
    const int down = int(std::min<int64_t>(kFewThreads / plan.across, divide_up(plan.rows, beside) * beside));
    threads = down * plan.across;
    plan.room = room_of_few(p, plan.rows, threads, plan.across, cluster);
    return size_t(plan.room.bytes) + 1024 <= size_t(device.shared_a_block);
  };
  // One cluster if it holds them; else as many as there can be, since a second kernel is there anyway.
  if (p.rows > kMostClusterRows || p.rows * p.n > kMostClusterElements || !fits()) {
    clusters = int(std::min<int64_t>(grants.few_clusters, p.rows));
    if (clusters < 2 || !fits()) return false;
    clusters = int(divide_up(p.rows, plan.rows));
  }
  if (clusters > grants.few_clusters) return false;
  plan.kernel = NormBackwardKernel::few;
  plan.reason = clusters > 1 ? "the rows are few: clusters share them, and their blocks the columns"
                             : "the rows are few: a cluster has all of them, its blocks some columns each";
  plan.blocks = clusters;
  plan.shape = {int64_t(clusters) * cluster, threads, 1, cluster, size_t(plan.room.bytes)};
  if (clusters > 1) leave_sums(plan, p, p.grad_x_bias ? 3 : p.grad_bias ? 2 : 1, clusters);
  return true;
}

// ---- short rows in tiles: norm_backward_tiled.cuh ----

constexpr int kTileTurns = 4;  // rows that a part of a warp has of a tile
constexpr int kMostTileStages = 4, kLeastTileStages = 3;
constexpr int64_t kLongestOddTile = 128;  // elements

constexpr int tile_threads(bool added) { return added ? 384 : 512; }  // of a block

inline bool plan_tiles(NormBackwardPlan& plan, const NormBackwardProblem& p, bool odd, const Device& device) {
  const int size = 16 / p.y_size;
  const bool takes = odd ? p.n % size != 0 && p.n > size && p.n <= kLongestOddTile : p.n % size == 0 && p.n <= kWarp * size;
  if (!device.clusters || !takes || !p.rows_aligned) return false;
  plan.sums = odd ? kSumsOfAddedNorm : p.sums();
  const bool added = plan.sums == kSumsOfAddedNorm;
  const int threads = power_of_two_from(divide_up(p.n, size));
  const int rows_of_tile = kTileTurns * (kWarp / threads);
  const int64_t tiles = divide_up(p.rows, rows_of_tile);
  const int stage = rows_of_tile * int(p.n) * (p.x_size * (added ? 2 : 1) + p.y_size);
  const int room = device.shared_a_block - 1024;
  const int blocks = int(std::min<int64_t>(tiles, device.processors));
  const int64_t most_warps = tile_threads(added) / kWarp;
  const int warps = int(std::min<int64_t>({most_warps, room / stage / kLeastTileStages, divide_up(tiles, blocks)}));
  plan.stages = std::min(kMostTileStages, room / (stage * warps));
  const size_t sums = size_t(plan.sums) * warps * threads * size * sizeof(float);
  plan.kernel = odd ? NormBackwardKernel::tiled_odd : NormBackwardKernel::tiled;
  plan.reason = odd ? "rows are short and do not keep to 16-byte steps: neighbors of them are whole vectors"
                    : "rows are short: warps have tiles of several, through rings in shared memory";
  plan.shape = {blocks, threads, warps * (kWarp / threads), 1, std::max(size_t(plan.stages) * warps * stage, sums)};
  leave_sums(plan, p, plan.sums, blocks);
  return true;
}

// ---- rows ahead in shared memory: norm_backward_ring.cuh ----

constexpr int kMostRingStages = 6, kMostRingGroups = 16;

// Threads of a block at most, by the slots of each.
constexpr int ring_threads(int slots, bool wide) { return slots > 2 ? (wide ? 384 : 512) : wide ? 512 : 640; }

struct Ring {
  int slots = 0;  // of a thread; 0: no ring for these rows
  int threads = 0, groups = 1, cluster = 1, stages = 0;
  size_t shared = 0;
};

// Bytes on their way to a multiprocessor, of sums' rows of so many bytes, and of those with a mask where all sm_90 parts
// grant the cluster: with a mask 0.930 and 0.919 of the copy bandwidth at 512 and 2,048 elements of 16 bits, 0.915 and
// 0.909 with 192 KB; 0.922 and 0.903 at 8,192, 0.908 and 0.895 at 65,536.
constexpr int64_t kMostAhead = 160 << 10, kLongestFew = 4096;
// Of sums' rows over so many blocks and more a cluster has neighbours: 0.923 in place of 0.903 at 65,536, with a mask
// 0.912 and 0.908, 0.904 and 0.894 at 32,768; of clusters of 2 and 16 and of blocks 0.01 to 0.1 less.
constexpr int kNeighborsFrom = 4;
constexpr int64_t kLongestHeld = 8192;  // bytes: few rows of so many are held in registers
constexpr int64_t kFewVectors = 512;    // of a block of a cluster, or more
constexpr int kBehind = 3;              // rows in the ring, from which meetings are one row behind

// The ring of threads with so many slots in a cluster; false if no block holds two rows of it.
inline bool make_ring(Ring& ring, const NormBackwardProblem& p, int slots, int most_threads, int cluster, int most_stages,
                      bool measuring, const Device& device) {
  constexpr int kMeetings = 4, kStatic = 1536;  // and bytes that the kernel has of itself
  const bool added = is_added(p), wide = is_wide(p);
  const int64_t vectors = vectors_of(p);
  const int size = 16 / p.y_size;
  const bool one_warp = added && p.y_size == 2 && slots == 3 && cluster == 1 && vectors <= 3 * kWarp;
  if (!one_warp && slots != 2 && !(slots == 4 && !wide)) return false;
  if (cluster > kMostBlocks) return false;
  const int threads = int(divide_up(divide_up(vectors, int64_t(slots) * cluster), kWarp)) * kWarp;
  const int all = std::min(most_threads, ring_threads(slots, wide));
  if (threads > all) return false;
  int groups = cluster > 1 ? 1 : std::min(kMostRingGroups, all / threads);
  const int of_warp = kWarp * slots * size * (p.x_size * (added ? 2 : 1) + p.y_size);
  const int weight_bytes = p.weighted && p.fp32_weights ? 4 : p.y_size;
  int64_t stage, beside;  // bytes of a row of all groups, and of what a block has besides rows
  const auto measure = [&] {
    stage = int64_t(groups) * (threads / kWarp) * of_warp;
    beside = int64_t(threads) * slots * size * weight_bytes + int64_t(kMeetings) * cluster * groups * (threads / kWarp) * 8 + kStatic;
  };
  measure();
  if (added && is_mixed(p) && !measuring) {  // rows of fp32 fill shared memory before there is a thread for each vector of them
    for (const int wanted = threads == kWarp ? 2 : kBehind; groups > 1 && device.shared_a_block - beside < wanted * stage; measure()) {
      --groups;
    }
  }
  int stages = int(std::min<int64_t>({(device.shared_a_block - beside) / stage, most_stages, kMostRingStages}));
  if (added && !measuring && (p.n * p.y_size <= kLongestFew || (p.drops && cluster <= kMaxCluster))) {
    const int64_t ahead = divide_up(groups * p.n, int64_t(cluster)) * int64_t(2 * p.x_size + p.y_size);
    stages = std::min(stages, std::max(kBehind, int(kMostAhead / ahead)));
  }
  if (stages < 2) return false;
  const size_t sums = groups > 1 ? size_t(groups) * threads * slots * size * sizeof(float) : 0;
  ring = {slots, threads, groups, cluster, stages, std::max(size_t(stages * stage + beside - kStatic), sums)};
  return true;
}

// As rules lay it out; no slots where rows are held elsewhere.
inline Ring ring_by_rules(const NormBackwardProblem& p, const Device& device) {
  Ring ring;
  const bool wide = is_wide(p), mixed = is_added(p) && is_mixed(p);
  const int64_t vectors = vectors_of(p), bytes = p.n * p.y_size;
  const int64_t shortest = is_added(p) ? 768 : 8193;  // bytes of a row of y, for what the table does not know
  const auto fits = [&](int slots, int most_threads, int cluster, int most_stages) {
    return make_ring(ring, p, slots, most_threads, cluster, most_stages, false, device);
  };
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_BACKWARD, p.y_size, p.n);
  const bool table = choice && choice->stages >= 2 && !wide;
  if (!table && bytes < shortest) return ring;
  if (bytes <= kLongestHeld && p.rows < kFewNormRows * device.processors) return ring;
  const bool by_table = table && fits(choice->held, choice->block, choice->cluster, choice->stages);
  // A warp that holds a whole row waits for no other.
  const bool one_warp = mixed && vectors <= 3 * kWarp && fits(vectors <= 2 * kWarp ? 2 : 3, kMostThreads, 1, kMostRingStages);
  // With three rows in the ring meetings are one row behind; else a smaller cluster, with fewer slots.
  const bool found_already = one_warp || (by_table && ring.stages >= kBehind);
  for (int least = kBehind; !found_already && least > 1; --least) {
    bool found = false;
    for (int cluster = 1; !found && cluster <= kMostBlocks; cluster *= 2) {
      for (const int slots : {2, 4}) {
        if (slots == 4 && cluster < 4) continue;
        found = found || (fits(slots, kMostThreads, cluster, kMostRingStages) && ring.stages >= least);
      }
    }
    if (found) break;
    ring.slots = 0;
  }
  if (ring.slots == 0) return ring;
  while (p.rows * ring.cluster * 2 <= device.processors && ring.cluster < kMaxCluster &&
         vectors >= ring.cluster * kFewVectors && fits(2, kMostThreads, ring.cluster * 2, kMostRingStages)) {
  }  // few rows: more blocks for each
  return ring;
}

// `choice`: of the table, or one to be measured; null for rules.
inline bool plan_ring(NormBackwardPlan& plan, const NormBackwardProblem& p, const RowChoice* choice, const NormGrants& grants,
                      const Device& device) {
  if (!device.clusters || !in_vectors(p)) return false;
  Ring ring;
  if (!choice) {
    ring = ring_by_rules(p, device);
  } else if (choice->stages >= 2 && choice->held > 0 && choice->cluster > 0) {
    make_ring(ring, p, choice->held, choice->block, choice->cluster, choice->stages, true, device);
  }
  if (ring.slots == 0 || (ring.cluster > kMaxCluster && !grants.large_clusters)) return false;
  int64_t blocks = std::min(divide_up(p.rows, ring.groups), divide_up(device.processors, ring.cluster));
  if (ring.groups > 1) {  // few rows are spread over all multiprocessors
    ring.groups = int(std::min<int64_t>(ring.groups, divide_up(p.rows, device.processors)));
    blocks = std::min<int64_t>(device.processors, divide_up(p.rows, ring.groups));
  }
  plan.kernel = NormBackwardKernel::ring;
  plan.reason = ring.cluster > 1 ? "rows run ahead through rings in the shared memory of a cluster's blocks"
                                 : "rows run ahead through rings in shared memory";
  plan.sums = p.sums(), plan.slots = ring.slots, plan.stages = ring.stages;
  plan.neighbors = is_added(p) && ring.cluster >= kNeighborsFrom && ring.cluster <= kMaxCluster;
  plan.shape = {blocks * ring.cluster, ring.threads, ring.groups, ring.cluster, ring.shared};
  leave_sums(plan, p, plan.sums, blocks);
  return true;
}

// ---- rows in registers: norm_backward_rows.cuh ----

constexpr int kMostBarriers = 15;  // of a block's groups, beside that of all its threads

// Threads of a row in a block: a multiprocessor has two such groups, and one works while the other waits.
constexpr int kTwoBlocks = 256;

// Rows a turn: fewer where a slot has more tensors, or a thread more slots. Threads of a block: what registers allow.
constexpr int held_rows(int slots, bool wide) { return std::max(1, (wide ? 2 : 4) / slots); }
constexpr int held_threads(int slots, bool added, bool mixed) { return added && (slots > 1 || mixed) ? 384 : 512; }

// `choice`: the layout to take; null for the table's or that of rules.
inline bool plan_held(NormBackwardPlan& plan, const NormBackwardProblem& p, const RowChoice* choice, const NormGrants& grants,
                      const Device& device) {
  if (!in_vectors(p)) return false;
  const bool added = is_added(p), wide = is_wide(p);
  const int most_slots = p.y_size == 4 && !added ? 4 : 2, size = 16 / p.y_size;
  const int64_t slots = vectors_of(p);
  const auto most_threads = [&](int held) { return held_threads(held, added, is_mixed(p)); };
  int held = 0, cluster = 1;
  const auto fits = [&](int of_thread, int threads, int blocks) {
    if (of_thread < 1 || of_thread > most_slots || (blocks > 1 && !device.clusters)) return false;
    if (slots > int64_t(of_thread) * std::min(threads, most_threads(of_thread)) * blocks) return false;
    held = of_thread, cluster = blocks;
    return true;
  };
  // Layouts are measured, and stand in the table, for rows of one dtype. What has more in registers takes the first of these
  // that holds its rows.
  struct Layout {
    int slots, threads, cluster;
  };
  constexpr Layout kLayouts[] = {{1, kTwoBlocks, 1}, {2, kTwoBlocks, 1}, {1, kTwoBlocks, 2}, {2, kTwoBlocks, 2},
                                 {1, kTwoBlocks, 4}, {2, kTwoBlocks, 4}, {1, kTwoBlocks, 8}, {2, kTwoBlocks, 8},
                                 {1, 512, 8},        {2, 512, 8},        {2, 512, 16},       {4, 512, 16},
                                 {2, 512, 1},        {4, 512, 1}};
  const bool measured = choice || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;
  if (!choice) choice = choice_for(FUSELINE_LAYER_NORM_BACKWARD, p.y_size, p.n);
  const bool by_table = choice && choice->stages < 2 && (measured || !wide);
  if (!(by_table && fits(choice->held, choice->block, slots <= kWarp ? 1 : choice->cluster)) && !measured) {
    for (const Layout& layout : kLayouts) {
      // Of an added norm a multiprocessor has one block at a time with two slots.
      if (added && layout.slots > 1 && layout.cluster < kMaxCluster && device.clusters) continue;
      if (fits(layout.slots, layout.threads, layout.cluster)) break;
    }
  }
  if (held == 0 || (cluster > kMaxCluster && !grants.large_clusters)) return false;
  if (slots <= kWarp) held = 1;
  const int threads = int(divide_up(divide_up(slots, int64_t(held) * cluster), kWarp)) * kWarp;
  const int64_t turns = divide_up(p.rows, held_rows(held, wide));
  int64_t blocks = 0, groups = 1;
  if (cluster > 1) {
    const int at_once = std::max(1, most_threads(held) / kTwoBlocks);  // blocks of a multiprocessor
    blocks = std::min(turns, std::max<int64_t>(1, divide_up(int64_t(at_once) * device.processors, cluster)));
  } else {  // few rows are spread over all multiprocessors rather than stacked on some
    const int most_groups = std::max(1, std::min(most_threads(held) / threads, kMostBarriers));
    groups = std::min<int64_t>(most_groups, divide_up(turns, device.processors));
    blocks = std::min<int64_t>(device.processors, divide_up(turns, groups));
  }
  plan.kernel = NormBackwardKernel::held;
  plan.reason = cluster > 1 ? "registers of the blocks of a cluster hold the row" : "registers of a block hold the row";
  plan.sums = p.sums(), plan.slots = held;
  const size_t columns = size_t(groups) * threads * held * size;
  plan.shape = {blocks * cluster, threads, int(groups), cluster, p.wants_sums() ? plan.sums * columns * sizeof(float) : 0};
  leave_sums(plan, p, plan.sums, blocks);
  return true;
}

// ---- any rows: norm_backward_general.cuh ----

constexpr int kGeneralThreads = 384;  // whose registers hold what they have on its way
constexpr int kGeneralHeld = 8;       // elements that a thread has on their way at once
constexpr int kGeneralWarps = kGeneralThreads / kWarp;
constexpr int64_t kRowOfWarp = 512;    // elements of a row at most that one warp has
constexpr int64_t kRowsOfThread = 16;  // of a column, at least, before there are more shares

inline void plan_general(NormBackwardPlan& plan, const NormBackwardProblem& p, const Device& device) {
  const int64_t at_once = kWarp * kGeneralHeld;  // elements that a warp has
  int cluster = 1;
  while (device.clusters && cluster < kMaxCluster && p.n > cluster * at_once * kGeneralWarps) cluster *= 2;
  const int warps = int(std::min<int64_t>(kGeneralWarps, divide_up(p.n, cluster * at_once)));
  const int beside = p.n <= kRowOfWarp ? 4 : 1;
  plan.kernel = NormBackwardKernel::general;
  plan.reason = "no other kernel takes rows of this length, dtypes and addresses: sums over rows have a kernel of their own";
  plan.shape = {divide_up(p.rows, beside) * cluster, beside > 1 ? kWarp : warps * kWarp, beside, cluster, 0};
  if (!p.wants_sums()) return;
  plan.column_blocks = int(divide_up(p.n, kWarp));
  const int64_t of_device = divide_up(4 * device.processors, plan.column_blocks);
  plan.shares = int(std::clamp<int64_t>(divide_up(p.rows, kRowsOfThread * kGeneralWarps), 1, of_device));
  if (plan.shares > 1) leave_sums(plan, p, kSumsOfAddedNorm, plan.shares);
  if (p.grad_x_bias) plan.workspace += size_t(p.rows) * 2 * sizeof(float);  // what its sums are made of, behind the partial sums
}

}  // namespace norm_backward_plans

inline NormBackwardPlan plan_norm_backward(const NormBackwardProblem& p, const Device& device, const NormGrants& grants = {}) {
  using namespace norm_backward_plans;
  NormBackwardPlan plan;
  const bool by_rules = row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;  // which are being measured
  const NormOf of = p.grad_dropped || p.grad_x_bias ? NormOf::masked_sum : p.grad_sum ? NormOf::sum : NormOf::x;
  const bool in_table = !is_mixed(p) && (p.centred || !p.grad_bias);
  const RowChoice* const choice = in_table ? choice_for_many(of, p.centred, true, p.y_size, p.rows, p.n, device) : nullptr;
  if (choice) {
    const RowKernel kernel = choice->kernel;
    if (kernel == RowKernel::held && plan_held(plan, p, choice, grants, device)) return plan;
    if (kernel == RowKernel::ring && plan_ring(plan, p, choice, grants, device)) return plan;
    if (kernel != RowKernel::held && kernel != RowKernel::ring && plan_tiles(plan, p, false, device)) return plan;
    if (is_measured(choice)) return plan;
  }
  if (by_rules) {
    const RowChoice* const measured = &row_overrides[FUSELINE_LAYER_NORM_BACKWARD].choice;
    if (!plan_ring(plan, p, measured, grants, device)) plan_held(plan, p, nullptr, grants, device);
    return plan;
  }
  if (p.rows <= kMostFewRows && plan_apart(plan, p, device)) return plan;
  if (p.rows <= kMostFewRows && plan_few(plan, p, grants, device)) return plan;
  plan = {};
  if (plan_tiles(plan, p, false, device)) return plan;
  if (plan_ring(plan, p, nullptr, grants, device)) return plan;
  if (plan_held(plan, p, nullptr, grants, device)) return plan;
  if (p.rows > kMostFewRows && plan_tiles(plan, p, true, device)) return plan;  // the general kernels take less: they have no sums
  plan = {};
  plan_general(plan, p, device);
  return plan;
}

// Bytes of workspace, whatever the device grants.
inline size_t norm_backward_workspace(const NormBackwardProblem& p, const Device& device, const NormGrants& grants = {}) {
  const NormBackwardPlan plan = plan_norm_backward(p, device, grants);
  size_t bytes = plan.workspace;
  if (plan.shape.cluster > kMaxCluster) bytes = std::max(bytes, norm_backward_workspace(p, device, {false, grants.few_clusters}));
  if (plan.kernel == NormBackwardKernel::few && plan.blocks > 1) {
    bytes = std::max(bytes, norm_backward_workspace(p, device, {grants.large_clusters, 0}));
  }
  return bytes;
}

}  // namespace fuseline
