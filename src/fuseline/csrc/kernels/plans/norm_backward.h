// Which kernel takes the backward of a norm, and how: the one place that decides. norms/norms.cu launches what the plan says,
// and `fuseline explain layer_norm` prints it.
#pragma once

#include "norm_backward_few.h"

namespace fuseline {
namespace norm_backward_plans {

// ---- short rows in tiles: norm_backward_tiled.cuh ----

constexpr int kTileTurns = 4;  // rows that a part of a warp has of a tile
constexpr int kMostTileStages = 4, kLeastTileStages = 3;

constexpr int tile_threads(bool added) { return added ? 384 : 512; }  // of a block

inline bool plan_tiles(NormBackwardPlan& plan, const NormBackwardProblem& p, const Device& device) {
  const int size = 16 / p.y_size;
  if (!device.clusters || !p.rows_aligned || p.n % size != 0 || p.n > kWarp * size || has_rings_alone(p)) return false;
  plan.sums = p.sums();
  const bool added = is_added(p);
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
  plan.kernel = NormBackwardKernel::tiled;
  plan.reason = "rows are short: warps have tiles of several, through rings in shared memory";
  plan.shape = {blocks, threads, warps * (kWarp / threads), 1, std::max(size_t(plan.stages) * warps * stage, sums)};
  leave_sums(plan, p, plan.sums, blocks);
  return true;
}

// ---- rows ahead in shared memory: norm_backward_ring.cuh ----

constexpr int kMostRingStages = 6, kMostRingGroups = 16;

// Threads of a block at most, by the slots of each.
constexpr int ring_threads(int slots, bool added) { return slots > 2 ? (added ? 384 : 512) : added ? 512 : 640; }

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
  const bool added = is_added(p);
  const int64_t vectors = vectors_of(p);
  const int size = 16 / p.y_size;
  const bool one_warp = added && p.y_size == 2 && slots == 3 && cluster == 1 && vectors <= 3 * kWarp;
  if (!one_warp && slots != 2 && !(slots == 4 && !added)) return false;
  if (cluster > kMostBlocks || (has_rings_alone(p) && slots != 2)) return false;
  const int threads = int(divide_up(divide_up(vectors, int64_t(slots) * cluster), kWarp)) * kWarp;
  const int all = std::min(most_threads, ring_threads(slots, added));
  if (threads > all) return false;
  int groups = cluster > 1 ? 1 : std::min(kMostRingGroups, all / threads);
  const int of_warp = kWarp * slots * size * bytes_ahead(p, added);
  const int weight_bytes = p.weighted && p.fp32_weights ? 4 : p.y_size;
  int64_t stage, beside;  // bytes of a row of all groups, and of what a block has besides rows
  const auto measure = [&] {
    stage = int64_t(groups) * (threads / kWarp) * of_warp;
    const int64_t states = int64_t(kMeetings) * cluster * groups * (threads / kWarp) * 8;
    beside = int64_t(threads) * slots * size * weight_bytes + states + kStatic;
  };
  measure();
  if (is_mixed(p) && !measuring) {  // rows of fp32 fill shared memory before there is a thread for each vector of them
    const int wanted = threads == kWarp ? 2 : kBehind;
    for (; groups > 1 && device.shared_a_block - beside < wanted * stage; measure()) --groups;
  }
  int stages = int(std::min<int64_t>({(device.shared_a_block - beside) / stage, most_stages, kMostRingStages}));
  if (added && !measuring && (p.n * p.y_size <= kLongestFew || (p.drops && cluster <= kMaxCluster))) {
    const int64_t ahead = divide_up(groups * p.n, int64_t(cluster)) * int64_t(bytes_ahead(p, added));
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
  const int64_t vectors = vectors_of(p), bytes = p.n * p.y_size;
  // Bytes of a row of y, for what the table does not know.
  const int64_t shortest = p.fp16 ? 0 : is_added(p) ? 768 : 8193;
  const auto fits = [&](int slots, int most_threads, int cluster, int most_stages) {
    return make_ring(ring, p, slots, most_threads, cluster, most_stages, false, device);
  };
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_BACKWARD, p.y_size, p.n);
  const bool table = choice && choice->stages >= 2 && !is_added(p);
  if (!table && bytes < shortest) return ring;
  if (bytes <= kLongestHeld && p.rows < kFewNormRows * device.processors && !p.fp16 && !p.normalized) return ring;
  const bool by_table = table && fits(choice->held, choice->block, choice->cluster, choice->stages);
  // A warp that holds a whole row waits for no other.
  const bool one_warp =
      is_mixed(p) && vectors <= 3 * kWarp && fits(vectors <= 2 * kWarp ? 2 : 3, kMostThreads, 1, kMostRingStages);
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
constexpr int held_rows(int slots, bool added) { return std::max(1, (added ? 2 : 4) / slots); }
constexpr int held_threads(int slots, bool added, bool mixed) { return added && (slots > 1 || mixed) ? 384 : 512; }

// `choice`: the layout to take; null for the table's or that of rules.
inline bool plan_held(NormBackwardPlan& plan, const NormBackwardProblem& p, const RowChoice* choice, const NormGrants& grants,
                      const Device& device) {
  if (!in_vectors(p) || p.fp16) return false;
  const bool added = is_added(p);
  constexpr int kMostSlots = 2;
  const int size = 16 / p.y_size;
  const int64_t slots = vectors_of(p);
  const auto most_threads = [&](int held) { return held_threads(held, added, is_mixed(p)); };
  int held = 0, cluster = 1;
  const auto fits = [&](int of_thread, int threads, int blocks) {
    if (of_thread < 1 || of_thread > kMostSlots || (blocks > 1 && !device.clusters)) return false;
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
                                 {1, 512, 8},        {2, 512, 8},        {2, 512, 16},       {2, 512, 1}};
  const bool measured = choice || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;
  if (!choice) choice = choice_for(FUSELINE_LAYER_NORM_BACKWARD, p.y_size, p.n);
  const bool by_table = choice && choice->stages < 2 && (measured || !added);
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
  const int64_t turns = divide_up(p.rows, held_rows(held, added));
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
    if (kernel != RowKernel::held && kernel != RowKernel::ring && plan_tiles(plan, p, device)) return plan;
    if (is_measured(choice)) return plan;
  }
  if (by_rules) {
    const RowChoice* const measured = &row_overrides[FUSELINE_LAYER_NORM_BACKWARD].choice;
    if (!plan_ring(plan, p, measured, grants, device)) plan_held(plan, p, nullptr, grants, device);
    return plan;
  }
  if (!p.normalized) {
    if (p.rows <= kMostFewRows && plan_apart(plan, p, device)) return plan;
    if (p.rows <= kMostFewRows && plan_few(plan, p, grants, device)) return plan;
    plan = {};
    if (plan_tiles(plan, p, device)) return plan;
  }
  if (plan_ring(plan, p, nullptr, grants, device)) return plan;
  if (!p.normalized && plan_held(plan, p, nullptr, grants, device)) return plan;
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
