// The host's half of the norms' backward: how the kernel is laid out for a length, and its launches.
#pragma once

#include "rows/choice.h"
#include "norm_backward_rows.cuh"
#include "norm_sums.h"

namespace fuseline {

struct BackwardPlan {
  int slots = 0;    // of a thread; 0: no cluster holds the row
  int threads = 0;  // share a row, in one block
  int groups = 1;   // of threads in a block, each with rows of its own
  int cluster = 1;  // blocks share a row
  int blocks = 0;   // with partial sums of their own at most, a cluster counting once
};

constexpr int kMostBarriers = 15;  // of a block's groups, beside that of all its threads

// Threads of a row in a block: a multiprocessor has two such groups, and one works while the other waits.
constexpr int kTwoBlocks = 256;

// The kernels of one family, by what a thread has.
template <class X, class Y, int kSums, bool kCentred>
struct BackwardFamily {
  static constexpr bool kAdded = kSums == kSumsOfAddedNorm;
  static constexpr bool kMixed = sizeof(X) > sizeof(Y);
  static constexpr int kSize = kVector<Y>;
  static constexpr int kMostSlots = sizeof(Y) == 4 && !kAdded ? 4 : 2;
  static constexpr bool kWide = kAdded || kMixed;

  // Rows a turn: fewer where a slot has more tensors, or a thread more slots. Threads of a block: what registers allow.
  static constexpr int rows_a_turn(int slots) { return std::max(1, (kWide ? 2 : 4) / slots); }
  static constexpr int most_threads_of(int slots) { return kAdded && (slots > 1 || kMixed) ? 384 : 512; }
  template <int kSlots>
  using Kind = HeldKind<X, Y, kSlots, rows_a_turn(kSlots), most_threads_of(kSlots), kSums, kCentred>;

  // For rows in 16-byte steps.
  static BackwardPlan plan(int64_t rows, int64_t n, const Device& device, const RowChoice* requested = nullptr) {
    BackwardPlan plan;
    const int64_t slots = divide_up(n, kSize);
    const auto fits = [&](int held, int threads, int cluster) {
      if (held > kMostSlots || (cluster > 1 && !device.clusters)) return false;
      if (slots > int64_t(held) * std::min(threads, most_threads_of(held)) * cluster) return false;
      plan.slots = held, plan.cluster = cluster;
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
    const RowChoice* choice = requested ? requested : choice_for(FUSELINE_LAYER_NORM_BACKWARD, sizeof(Y), n);
    const bool measured = requested || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;
    const bool by_table = choice && choice->stages < 2 && (measured || !kWide);
    if (!(by_table && fits(choice->held, choice->block, slots <= kWarp ? 1 : choice->cluster)) && !measured) {
      for (const Layout& layout : kLayouts) {
        // Of an added norm a multiprocessor has one block at a time with two slots.
        if (kAdded && layout.slots > 1 && layout.cluster < kMaxCluster && device.clusters) continue;
        if (fits(layout.slots, layout.threads, layout.cluster)) break;
      }
    }
    if (plan.slots == 0) return plan;
    if (slots <= kWarp) plan.slots = 1;
    plan.threads = int(divide_up(divide_up(slots, int64_t(plan.slots) * plan.cluster), kWarp)) * kWarp;
    const int64_t turns = divide_up(rows, rows_a_turn(plan.slots));
    if (plan.cluster > 1) {
      const int at_once = most_threads_of(plan.slots) / kTwoBlocks;  // blocks of a multiprocessor
      const int64_t most = divide_up(int64_t(std::max(1, at_once)) * device.processors, plan.cluster);
      plan.blocks = int(std::min(turns, std::max<int64_t>(1, most)));
      return plan;
    }
    // Few rows are spread over all multiprocessors rather than stacked on some.
    const int64_t spread = divide_up(turns, device.processors);
    const int most_groups = std::min(most_threads_of(plan.slots) / plan.threads, kMostBarriers);
    plan.groups = int(std::min<int64_t>(std::max(1, most_groups), spread));
    plan.blocks = int(std::min<int64_t>(device.processors, divide_up(turns, plan.groups)));
    return plan;
  }

  static int64_t blocks(int64_t rows, int64_t n, const Device& device) {
    return n % kSize == 0 ? plan(rows, n, device).blocks : 0;
  }

  template <class Kind>
  static int run_held(NormBackward a, const BackwardPlan& plan, const Device& device, void* stream) {
    const size_t columns = size_t(plan.groups) * plan.threads * plan.slots * kSize;
    const size_t parts = a.partials ? kSums * columns * sizeof(float) : 0;
    const auto kernel = norm_backward_held<Kind>;
    int count = 0;
    a.cluster = plan.cluster;
    if (plan.cluster > kMaxCluster) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    const cudaError_t error = resident_clusters(kernel, device, plan.threads * plan.groups, parts, plan.cluster, count);
    if (error != cudaSuccess && plan.cluster <= kMaxCluster) return int(error);
    if (error != cudaSuccess || count == 0) {  // larger clusters than all devices have
      cudaGetLastError();
      return FUSELINE_UNSUPPORTED;
    }
    const int blocks = plan.cluster > 1 ? std::min(plan.blocks, count) : plan.blocks;
    const dim3 block(unsigned(plan.threads), unsigned(plan.groups));
    const int failed = launch(kernel, a, int64_t(blocks) * plan.cluster, block, parts, plan.cluster, stream, device.clusters);
    return failed || !a.partials ? failed : add_partials<Y>(a, kSums, blocks, device.clusters, stream);
  }

  // FUSELINE_UNSUPPORTED for rows that no cluster holds, or that do not keep to 16-byte steps.
  static int run(const NormBackward& a, const Device& device, void* stream, const RowChoice* requested) {
    if (!in_vectors<kSize>(a)) return FUSELINE_UNSUPPORTED;
    const BackwardPlan plan = BackwardFamily::plan(a.rows, a.n, device, requested);
    if (plan.slots == 0) return FUSELINE_UNSUPPORTED;
    if (plan.slots == 1) return run_held<Kind<1>>(a, plan, device, stream);
    if constexpr (kMostSlots == 4) {
      if (plan.slots == 4) return run_held<Kind<4>>(a, plan, device, stream);
    }
    return run_held<Kind<2>>(a, plan, device, stream);
  }
};

}  // namespace fuseline
