// The host's half of norm_backward_ring.cuh: how many threads of how many blocks share a long row, and the launch.
#pragma once

#include "rows/choice.h"
#include "norm_backward_ring.cuh"
#include "norm_backward_tiled.cuh"
#include "norm_sums.h"

namespace fuseline {

struct RingPlan {
  int slots = 0;  // of a thread; 0: no ring for these rows
  int threads = 0, groups = 1, cluster = 1, stages = 0;
  int blocks = 0;  // with partial sums of their own at most, a cluster counting once
  size_t shared = 0;
};

template <class X, class Y, int kSums, bool kCentred>
struct RingFamily {
  static constexpr bool kAdded = kSums == kSumsOfAddedNorm;
  static constexpr bool kMixed = kAdded && sizeof(X) > sizeof(Y);  // an fp32 stream, branches of 16 bits
  static constexpr bool kWide = kAdded || sizeof(X) > sizeof(Y);
  static constexpr int kSize = kVector<Y>;
  template <int kSlots>
  using Kind = RingKind<X, Y, kSlots, kSums, kCentred>;
  static constexpr int kMostSlots = kWide ? 2 : 4;
  static constexpr bool kOneWarp = kAdded && sizeof(Y) == 2;  // of a row has three slots
  using Tiles = TileFamily<X, Y, kSums, kCentred, TileRows::kVectors>;

  // What a block has in shared memory besides rows.
  static int64_t beside(int threads, int groups, int slots, int cluster, int weight_bytes) {
    const int64_t states = int64_t(kMeetings) * cluster * groups * (threads / kWarp) * 8;
    return int64_t(threads) * slots * kSize * weight_bytes + states + kStatic;
  }

  // `weight_bytes`: of an element; `masked`: a sum's dropout has a mask; `requested`: the layout, or null.
  static RingPlan plan(int64_t rows, int64_t n, int weight_bytes, bool masked, const Device& device,
                       const RowChoice* requested = nullptr) {
    RingPlan plan;
    if (!device.clusters || n % kSize != 0) return plan;
    const int64_t vectors = divide_up(n, kSize), bytes = n * int64_t(sizeof(Y));
    const bool measuring = requested || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;
    const auto fits = [&](int slots, int most_threads, int cluster, int most_stages) {
      const bool one_warp = kOneWarp && slots == 3 && cluster == 1 && vectors <= 3 * kWarp;
      if (!one_warp && (slots > kMostSlots || (slots != 2 && slots != 4))) return false;
      if (cluster > kMostBlocks) return false;
      const int threads = int(divide_up(divide_up(vectors, int64_t(slots) * cluster), kWarp)) * kWarp;
      if (threads > most_threads || threads > threads_of(slots)) return false;
      const int all = std::min(most_threads, threads_of(slots));
      int groups = cluster > 1 ? 1 : std::min(kMostRingGroups, all / threads);
      int64_t stage, room;
      const auto measure = [&] {
        stage = int64_t(groups) * (threads / kWarp) * stage_of(slots);
        room = device.shared_a_block - beside(threads, groups, slots, cluster, weight_bytes);
      };
      measure();
      if (kMixed && !measuring) {  // rows of fp32 fill shared memory before there is a thread for each vector of them
        for (const int wanted = threads == kWarp ? 2 : kBehind; groups > 1 && room < wanted * stage; measure()) --groups;
      }
      int stages = int(std::min<int64_t>({room / stage, most_stages, kMostRingStages}));
      if (kAdded && !measuring && (bytes <= kLongestFew || (masked && cluster <= kMaxCluster))) {
        const int64_t ahead = divide_up(groups * n, int64_t(cluster)) * int64_t(2 * sizeof(X) + sizeof(Y));
        stages = std::min(stages, std::max(kBehind, int(kMostAhead / ahead)));
      }
      if (stages < 2) return false;
      plan.slots = slots, plan.threads = threads, plan.groups = groups, plan.cluster = cluster, plan.stages = stages;
      plan.shared = size_t(stages * stage + beside(threads, groups, slots, cluster, weight_bytes) - kStatic);
      const size_t sums = groups > 1 ? size_t(groups) * threads * slots * kSize * sizeof(float) : 0;
      plan.shared = std::max(plan.shared, sums);
      return true;
    };
    const RowChoice* choice = requested ? requested : choice_for(FUSELINE_LAYER_NORM_BACKWARD, sizeof(Y), n);
    if (measuring && choice->stages < 2) return plan;
    const bool table = choice && choice->stages >= 2 && (measuring || !kWide);
    if (!table && (measuring || bytes < kShortestRing)) return plan;
    if (!measuring && bytes <= kLongestHeld && rows < kFewRows * device.processors) return plan;
    const bool by_table = table && fits(choice->held, choice->block, choice->cluster, choice->stages);
    // A warp that holds a whole row waits for no other.
    const bool one_warp = kMixed && !measuring && vectors <= 3 * kWarp &&
                          fits(vectors <= 2 * kWarp ? 2 : 3, kMostThreads, 1, kMostRingStages);
    // With three rows in the ring meetings are one row behind; else a smaller cluster, with fewer slots.
    const bool found_already = one_warp || (by_table && plan.stages >= kBehind);
    for (int least = kBehind; !measuring && !found_already && least > 1; --least) {
      bool found = false;
      for (int cluster = 1; !found && cluster <= kMostBlocks; cluster *= 2) {
        for (const int slots : {2, 4}) {
          if (slots == 4 && cluster < 4) continue;
          found = found || (fits(slots, kMostThreads, cluster, kMostRingStages) && plan.stages >= least);
        }
      }
      if (found) break;
      plan.slots = 0;
    }
    if (measuring ? !by_table : plan.slots == 0) return RingPlan{};
    while (!measuring && rows * plan.cluster * 2 <= device.processors && plan.cluster < kMaxCluster &&
           vectors >= plan.cluster * kFewVectors && fits(2, kMostThreads, plan.cluster * 2, kMostRingStages)) {
    }  // few rows: more blocks for each
    const int64_t turns = divide_up(rows, plan.groups);
    plan.blocks = int(std::min(turns, divide_up(device.processors, plan.cluster)));
    if (plan.groups > 1) {  // few rows are spread over all multiprocessors
      plan.groups = int(std::min<int64_t>(plan.groups, divide_up(rows, device.processors)));
      plan.blocks = int(std::min<int64_t>(device.processors, divide_up(rows, plan.groups)));
    }
    return plan;
  }

  // The most blocks of any plan for such rows: wider weights only make clusters larger, or groups fewer.
  static int64_t blocks(int64_t rows, int64_t n, const Device& device) {
    const RingPlan ring = plan(rows, n, int(sizeof(Y)), false, device);
    const bool alone = ring.cluster == 1 && ring.slots > 0;
    return std::max<int64_t>({Tiles::plan(rows, n, device).blocks, ring.blocks,
                              alone ? std::min<int64_t>(rows, device.processors) : 0});
  }

  // All of the backward; false for rows that neither a ring nor tiles take.
  static bool run(NormBackward a, const Device& device, void* stream, int& error, const RowChoice* requested) {
    const bool rings = requested ? requested->kernel == RowKernel::ring : row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;
    if (!rings && Tiles::run(a, device, stream, error)) return true;
    if (!in_vectors<kSize>(a) || (requested && !rings)) return false;
    const int weight_bytes = a.weight && a.fp32_weights ? 4 : int(sizeof(Y));
    const RingPlan plan = RingFamily::plan(a.rows, a.n, weight_bytes, a.dropout.seed, device, requested);
    if (plan.slots == 0) return false;
    a.cluster = plan.cluster, a.stages = plan.stages;
    a.beside = kAdded && plan.cluster >= kBesideFrom && plan.cluster <= kMaxCluster;
    const auto kernel = kernel_for(plan.slots);
    int count = 0;
    if (plan.cluster > kMaxCluster) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    const cudaError_t found = resident_clusters(kernel, device, plan.threads * plan.groups, plan.shared, plan.cluster, count);
    if (found != cudaSuccess || count == 0) {  // larger clusters than all devices have
      cudaGetLastError();
      error = int(found);
      return plan.cluster <= kMaxCluster && error != 0;
    }
    const int blocks = std::min(plan.blocks, count);
    error = launch(kernel, a, int64_t(blocks) * plan.cluster, dim3(plan.threads, plan.groups), plan.shared, plan.cluster,
                   stream, true);
    if (!error && a.partials) error = add_partials<Y>(a, kSums, blocks, true, stream);
    return true;
  }

 private:
  static constexpr int kBehind = 3;
  // Bytes on their way to a multiprocessor, of sums' rows of so many bytes, and of those with a mask where all sm_90 parts
  // grant the cluster: with a mask 0.930 and 0.919 of the copy bandwidth at 512 and 2,048 elements of 16 bits, 0.915 and
  // 0.909 with 192 KB; 0.922 and 0.903 at 8,192, 0.908 and 0.895 at 65,536.
  static constexpr int64_t kMostAhead = 160 << 10, kLongestFew = 4096;
  // Of sums' rows over so many blocks and more a cluster has neighbours: 0.923 in place of 0.903 at 65,536, with a mask
  // 0.912 and 0.908, 0.904 and 0.894 at 32,768; of clusters of 2 and 16 and of blocks 0.01 to 0.1 less.
  static constexpr int kBesideFrom = 4;
  static constexpr int64_t kLongestHeld = 8192, kFewRows = 8;  // few rows of so many bytes are held in registers
  static constexpr int64_t kFewVectors = 512;                   // of a block of a cluster, or more
  static constexpr int kStatic = 1536;  // bytes that the kernel has of itself
  static constexpr int64_t kShortestRing = kAdded ? 768 : 8193;  // bytes of a row of y, for what the table does not know

  // Calls run with the kernel's kind.
  template <class Run>
  static auto with_kind(int slots, Run&& run) {
    if (slots == 2) return run(Kind<2>{});
    if constexpr (kOneWarp) {
      return run(Kind<3>{});
    } else {
      return run(Kind<kMostSlots>{});
    }
  }
  static int threads_of(int slots) {
    return with_kind(slots, [](auto kind) { return decltype(kind)::kThreads; });
  }
  static int stage_of(int slots) {
    return with_kind(slots, [](auto kind) { return decltype(kind)::kStage; });
  }
  static auto kernel_for(int slots) -> void (*)(NormBackward) {
    return with_kind(slots, [](auto kind) -> void (*)(NormBackward) { return norm_backward_ring<decltype(kind)>; });
  }
};

}  // namespace fuseline
