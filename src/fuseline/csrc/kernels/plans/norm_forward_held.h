// How threads hold rows of one dtype in registers, in the norms' forward: norms/norm_forward_held.cuh, norm_forward_packed.cuh
// and norm_forward_few.cuh.
#pragma once

#include "norm_forward_problem.h"
#include "packed.h"

namespace fuseline {
namespace norm_forward_plans {

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

// Whether a part of a warp can hold rows with so many vectors a thread: what is seldom asked for has no kernel.
inline bool warps_hold(const NormForwardProblem& p, int held) {
  if (held == 2) return p.y_size == 2 && !is_masked(p);
  if (held == 3) return is_masked(p) || (!is_added(p) && !p.fp16);
  if (held == 4) return !is_added(p) && p.y_size == 2;
  return held == 1;
}

// Whole warps of rows that are a warp's or less, few of them spread over the multiprocessors; blocks where no warp can hold them.
inline void share_warps(Holding& plan, const NormForwardProblem& p, int block, bool few, const Device& device) {
  const int64_t rows = p.rows, vectors = vectors_of(p);
  if (plan.held == 2 && !warps_hold(p, 2) && warps_hold(p, 3)) plan.held = 3, plan.threads = int(divide_up(vectors, 3));
  if (!warps_hold(p, plan.held)) {
    plan.held = vectors <= kMostThreads ? 1 : 2;
    return share_blocks(plan, vectors, false);
  }
  plan.one_warp = true;
  plan.threads = power_of_two_from(plan.threads);
  const int a_warp = kWarp / plan.threads;
  const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
  plan.beside = int(std::min<int64_t>(std::max(std::min(block, kMostShortRowBlock), kWarp) / plan.threads, spread));
  const bool several = !few && plan.held == 1 && !p.fp16 && (is_added(p) || p.y_size == 2);
  plan.rows = plan.beside * (several ? kShortRows : 1);
}

// Few rows are spread over all threads that there are, one vector each while these last: a warp alone issues instructions
// for longer than warps take to meet. In us, LayerNorm of 128 x 4,096 elements of 16 bits: 512 threads of one vector 2.82, 256
// of two 3.38; clusters of 2 blocks of 256 2.96, of 4 of 128 3.18. Of 4 rows, blocks of 128: 1.68, of 256 1.73, one of 512
// 1.84.
inline bool hold_few(Holding& plan, const NormForwardProblem& p, const Device& device) {
  const int64_t rows = p.rows, vectors = vectors_of(p), threads = int64_t(device.processors) * 1024;
  if (rows * vectors > 2 * threads) return false;
  const bool clusters = device.clusters && !(p.fp16 && !is_added(p));
  const int64_t most = int64_t(clusters ? kMaxCluster : 1) * kMostThreads;  // threads of a row
  plan.held = rows * vectors > threads || vectors > most || (p.fp16 && vectors > kMostThreads) ? 2 : 1;
  if (vectors > kWarp * plan.held) {
    share_blocks(plan, vectors, clusters, rows * 4 <= device.processors && !p.fp16 ? 128 : kMostThreads);
    return plan.held > 0;
  }
  plan.threads = int(divide_up(vectors, plan.held));
  share_warps(plan, p, kShortRowBlock, true, device);
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
  if (!given && !warps && hold_few(plan, p, device)) {
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
  if (plan.held > 1 && power_of_two_from(plan.threads) * plan.held * 3 >= vectors * 4 && warps_hold(p, 3)) {
    plan.threads = int(divide_up(vectors, 3)), plan.held = 3;
  }
  share_warps(plan, p, choice->block, false, device);
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
  if (hold_few(plan, p, device)) return plan;
  plan = {};
  if (vectors > int64_t(most) * kMostOfSum * kMaxCluster) return plan;
  plan.held = in_thirds(p) ? 3 : vectors <= 8 ? 1 : kMostOfSum;
  if (vectors > kWarp * plan.held) {
    share_blocks(plan, vectors, device.clusters, vectors > int64_t(kMostThreads) * kMostOfSum ? most : kMostThreads);
    return plan;
  }
  plan.threads = int(divide_up(vectors, plan.held));
  share_warps(plan, p, kShortRowBlock, false, device);
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
    if (plan.packed || !warps_hold(p, choice.held)) return plan;
    plan.held = choice.held, plan.threads = int(threads);
    share_warps(plan, p, choice.block, false, device);
    return plan;
  }
  plan.threads = int(divide_up(threads, kWarp)) * kWarp;
  if (plan.cluster == 1) plan.beside = plan.rows = std::max(1, std::min(choice.block, kMostThreads) / plan.threads);
  bool there = choice.held < 3 && !(p.fp16 && plan.cluster > 1 && (choice.held == 1 || !added));
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
  if (p.n > kLongestNormRow || (p.fp16 && is_masked(p))) return false;
  const bool bf16 = p.y_size == 2 && !p.fp16, own_weights = !p.fp32_weights;
  const bool may_pack = bf16 && !is_added(p) && own_weights;
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
  } else if (bf16 && !is_masked(p) && own_weights && alone && plan.held == 1 && !plan.early) {
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

}  // namespace norm_forward_plans
}  // namespace fuseline
