// How the norms' backward takes few rows (norms/norm_backward_apart.cuh, norm_backward_few.cuh), and rows that no other kernel
// takes (norm_backward_general.cu).
#pragma once

#include "norm_backward_problem.h"

namespace fuseline {
namespace norm_backward_plans {

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
  if (vectors > most_slots * kApartThreads || !in_vectors(p) || p.fp16) return false;
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
  if (!in_vectors(p) || p.fp16 || p.rows * p.n > kMostElements) return false;
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

// ---- any rows: norm_backward_general.cu ----

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
}  // namespace fuseline
