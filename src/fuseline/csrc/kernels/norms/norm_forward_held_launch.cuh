// The host's half of the norms' forward of rows that threads hold in registers: how many vectors each has of which rows.
#pragma once

#include "rows/choice.h"
#include "norm_forward_few.cuh"
#include "norm_forward_held.cuh"
#include "norm_forward_packed.cuh"

namespace fuseline {

constexpr int kShortRows = 2;  // a thread has of rows that take one vector of it
constexpr int kMostHeld = 4;   // vectors of a thread; 2 of each tensor where a sum is made on the way
constexpr int64_t kFewWaiting = 8;  // rows a multiprocessor, of which an RMS norm waits in shared memory, too
constexpr int kRowsBeside = 4;   // of a block, each with a quarter of the threads
constexpr int kMostEarly = 128;  // threads of a block whose weights, four vectors a thread, come with the row

struct HeldPlan {
  int held = 0;           // vectors a thread holds; 0: rows are not held
  int threads = 0;        // of a block that share a row
  bool one_warp = false;  // has the whole row
  bool early = false;     // of rows in blocks, weights of four vectors are on their way with these
  int beside = 1;         // rows a block has at a time
  int rows = 1;           // and in all
  int cluster = 1;        // blocks share a row
  bool packed = false;    // as it came (norm_forward_packed.cuh)
};

// As many blocks as hold `vectors`, of `most` threads while there are more, and the threads of each. No vectors held: a
// cluster does not hold them.
inline void share_blocks(HeldPlan& plan, int64_t vectors, bool clusters, int most = kMostThreads) {
  while (clusters && plan.cluster < kMaxCluster && vectors > int64_t(plan.cluster) * most * plan.held) {
    plan.cluster *= 2;
  }
  plan.threads = int(divide_up(divide_up(vectors, plan.held * plan.cluster), kWarp)) * kWarp;
  if (plan.threads > kMostThreads) plan.held = 0;
}

// Whole warps of rows that are a warp's or less, few of them spread over the multiprocessors.
inline void share_warps(HeldPlan& plan, int64_t rows, int block, bool few, const Device& device) {
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
inline bool plan_few_held(HeldPlan& plan, int64_t rows, int64_t vectors, const Device& device) {
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
template <class T>
HeldPlan plan_held(int64_t rows, int64_t vectors, bool centred, bool may_pack, const RowChoice* choice,
                   const Device& device) {
  HeldPlan plan;
  const bool warps = rows > 2 * device.processors && vectors > 2 * kWarp && vectors <= 3 * kWarp;
  const bool given = row_overrides[FUSELINE_LAYER_NORM_FORWARD].given;
  if (!given && !warps && plan_few_held(plan, rows, vectors, device)) {
    // Rows of four warps each, of which a multiprocessor has three or four, are one block's: 512 x 1,024 RMS norms take
    // 2.62 us in place of 2.77, layer norms 2.73 in place of 2.95; two a block 2.80 and 2.97.
    const bool four = plan.held == 1 && plan.cluster == 1 && plan.threads * kRowsBeside == kMostThreads;
    if (four && rows > 2 * device.processors && rows <= kRowsBeside * device.processors) {
      plan.beside = plan.rows = kRowsBeside;
    }
    return plan;
  }
  plan = {};
  if (!choice || vectors > int64_t(kMostThreads) * kMostHeld) return plan;
  const bool waits = given || (centred && !may_pack) || rows <= kFewWaiting * device.processors;
  if (choice->stages > 0 && device.clusters && waits) return plan;  // in shared memory
  plan.held = std::min(power_of_two_from(choice->held), kMostHeld);
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
    plan.early = !std::is_same_v<T, __half> && plan.held == kMostHeld && plan.threads <= kMostEarly &&
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
inline bool in_thirds(const NormForward& a, int64_t vectors) {
  if (!a.dropout.seed) return false;
  return vectors == 3 * kWarp || (a.centred && vectors == 3 * kWarp / 2);
}

// Of a sum: two vectors of each tensor a thread read 0.972, 0.979 and 0.980 of the copy bandwidth at 1,024, 4,096 and 8,192
// elements of 16 bits, one 0.973, 0.889 and less, four 0.975 (of a warp's rows), 0.976 and 0.972. A row of up to 8,192 is a
// block's. Clusters of blocks of 256 threads have longer ones, 0.982 at 16,384 and 0.976 at 32,768, where rows that wait in
// shared memory read 0.971 and 0.964; at 65,536 these read 0.962, blocks of 512 threads 0.953.
inline HeldPlan plan_held_sum(int64_t rows, int64_t vectors, bool masked, bool in_thirds, const Device& device) {
  constexpr int kMostOfSum = 2, kFewer = kMostThreads / 2;  // vectors, and threads
  // Few masked rows have no ring of copies that reads more.
  const int most = masked && vectors > int64_t(kFewer) * kMostOfSum * kMaxCluster ? kMostThreads : kFewer;
  HeldPlan plan;
  if (plan_few_held(plan, rows, vectors, device)) return plan;
  plan = {};
  if (vectors > int64_t(most) * kMostOfSum * kMaxCluster) return plan;
  plan.held = vectors <= 8 ? 1 : kMostOfSum;
  if (in_thirds) {
    plan.held = 3, plan.threads = int(vectors / 3);
    share_warps(plan, rows, kShortRowBlock, false, device);
    return plan;
  }
  if (vectors > kWarp * plan.held) {
    share_blocks(plan, vectors, device.clusters, vectors > int64_t(kMostThreads) * kMostOfSum ? most : kMostThreads);
    return plan;
  }
  plan.threads = int(divide_up(vectors, plan.held));
  share_warps(plan, rows, kShortRowBlock, false, device);
  return plan;
}

// The requested layout; no vectors held: there is no kernel for it. A block has as many rows as its threads hold.
template <class T, bool kAdded, bool kMasked>
HeldPlan plan_requested(const RowChoice& requested, int64_t rows, int64_t vectors, bool may_pack, const Device& device) {
  HeldPlan plan;
  const int64_t threads = divide_up(vectors, int64_t(requested.held) * requested.cluster);
  if (requested.held < 1 || requested.held > kMostHeld || requested.cluster < 1 || requested.cluster > kMaxCluster ||
      threads > kMostThreads) {
    return plan;
  }
  plan.cluster = requested.cluster, plan.early = requested.stages > 0, plan.packed = requested.kernel == RowKernel::packed;
  if (plan.cluster == 1 && threads <= kWarp) {
    if (plan.packed || (requested.held == 3 && kAdded && !kMasked) || (requested.held == 4 && kAdded)) return plan;
    plan.held = requested.held, plan.threads = int(threads);
    share_warps(plan, rows, requested.block, false, device);
    return plan;
  }
  plan.threads = int(divide_up(threads, kWarp)) * kWarp;
  if (plan.cluster == 1) plan.beside = plan.rows = std::max(1, std::min(requested.block, kMostThreads) / plan.threads);
  const bool half = std::is_same_v<T, __half>;
  bool there = requested.held < 3;
  if (requested.held == kMostHeld) {
    there = plan.cluster == 1 && !kAdded && (!plan.early || (!half && plan.threads * plan.beside <= kMostThreads / 2));
  }
  if (plan.packed) {
    there = may_pack && requested.held == kPackedVectors && plan.cluster == 1 && packs(plan.threads, vectors);
    plan.beside = plan.rows = 1;
  }
  if (there) plan.held = requested.held;
  return plan;
}

// Registers of a thread leave room for blocks enough; what a multiprocessor has at least.
template <class T, bool kAdded, bool kMasked>
auto held_kernel(const HeldPlan& plan) -> void (*)(NormForward) {
  constexpr int kShort = kMostShortRowBlock, kLong = kMostThreads;
  constexpr bool kEarly = !kMasked;  // registers that a mask takes
  const auto of = [](auto layout) -> void (*)(NormForward) {
    return norm_forward_held<T, decltype(layout), kAdded, kMasked>;
  };
  if (plan.cluster > 1) {
    if (plan.held == 1) return of(Holding<1, 1, false, kEarly, kLong, 2, true>{});
    return of(Holding<2, 1, false, kEarly, kLong, 2, true>{});
  }
  if (plan.one_warp) {
    if (plan.rows > plan.beside) return of(Holding<1, kShortRows, true, kEarly, kShort, 4>{});
    if (plan.held == 1) return of(Holding<1, 1, true, kEarly, kShort, 4>{});
    if (plan.held == 2) return of(Holding<2, 1, true, kEarly, kShort, 4>{});
    if constexpr (kMasked) {
      if (plan.held == 3) return of(Holding<3, 1, true, false, kShort, 3>{});
    }
    if constexpr (!kAdded) {
      if (plan.held == 3) return of(Holding<3, 1, true, true, kShort, 3>{});
      return of(Holding<4, 1, true, true, kShort, 2>{});
    }
  }
  if (plan.held == 1) return of(Holding<1, 1, false, kEarly, kLong, 2>{});
  if (plan.held == 2) return of(Holding<2, 1, false, kEarly, kLong, 2>{});
  if constexpr (!kAdded) {
    if constexpr (!std::is_same_v<T, __half>) {
      if (plan.early) return of(Holding<4, 1, false, true, 256, 3>{});
    }
    return of(Holding<4, 1, false, false, kLong, 2>{});
  }
  return nullptr;
}

template <class T, bool kAdded, bool kMasked = false>
bool run_held(NormForward a, const Device& device, void* stream, int& error, const RowChoice* requested) {
  const bool masked = a.x_bias || a.dropout.seed;
  if (kAdded && masked != kMasked) return false;
  bool aligned = a.n % kVector<T> == 0;
  for (const void* tensor : {a.x, a.residual, a.x_bias, a.weight, a.bias, static_cast<const void*>(a.y),
                             static_cast<const void*>(a.sum)}) {
    aligned = aligned && offset_in_vector(tensor) == 0;
  }
  if (!aligned || a.n > (int64_t(1) << 30)) return false;
  const int64_t vectors = a.n / kVector<T>;
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, sizeof(T), a.n);
  const bool may_pack = sizeof(T) == 2 && !kAdded && !(a.fp32_weights && (a.weight || a.bias));
  const HeldPlan plan = requested     ? plan_requested<T, kAdded, kMasked>(*requested, a.rows, vectors, may_pack, device)
                        : kAdded ? plan_held_sum(a.rows, vectors, kMasked, in_thirds(a, vectors), device)
                                 : plan_held<T>(a.rows, vectors, a.centred, may_pack, choice, device);
  if (plan.held == 0) return false;
  if constexpr (sizeof(T) == 2 && !kAdded) {
    if (plan.packed) {
      const PackedNorm packed{a, float(1.0 / double(a.n))};
      error = launch(norm_forward_packed<T>, packed, a.rows, dim3(unsigned(plan.threads)), 0, 1, stream, device.clusters);
      return true;
    }
  }
  if constexpr (sizeof(T) == 2 && !kMasked) {
    const bool own_weights = !(a.fp32_weights && (a.weight || a.bias));
    const bool few = plan.held == 1 && !plan.one_warp && plan.cluster == 1 && plan.rows == 1 && plan.beside == 1;
    if (few && own_weights && !plan.early) {
      error = run_few<T, kAdded>(a, plan.threads, device, stream);
      return true;
    }
  }
  a.cluster = plan.cluster;
  error = launch(held_kernel<T, kAdded, kMasked>(plan), a, divide_up(a.rows, plan.rows) * plan.cluster,
                 dim3(unsigned(plan.threads), unsigned(plan.beside)), 0, plan.cluster, stream, device.clusters);
  return true;
}

}  // namespace fuseline
