// The host's half of the norms' backward: how the kernel is laid out for a length, and its launches.
#pragma once

#include "choice.h"
#include "norm_backward_rows.cuh"
#include "norm_sums.cuh"

namespace fuseline {

struct BackwardPlan {
  int slots = 0;    // of a thread; 0: no cluster holds the row, take the kernels for long ones
  int threads = 0;  // share a row, in one block
  bool one_warp = false;
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
  static constexpr int rows_a_turn(int slots, bool shifted) {
    const int most = shifted ? (kWide ? 1 : 2) : (kWide ? 2 : 4);
    return std::max(1, most / slots);
  }
  static constexpr int most_threads_of(int slots, bool shifted) {
    if (kAdded && kMixed && slots > 1 && shifted) return 256;
    if (kAdded && (slots > 1 || kMixed)) return 384;
    return shifted && ((kMixed && slots > 1) || slots > 2) ? 384 : 512;
  }
  template <int kSlots, bool kOneWarp, bool kShifted>
  using Kind = HeldKind<X, Y, kSlots, rows_a_turn(kSlots, kShifted), most_threads_of(kSlots, kShifted), kSums, kCentred,
                        kOneWarp, kShifted>;

  static int most_slots(bool aligned) { return aligned ? kMostSlots : 2; }

  static BackwardPlan plan(int64_t rows, int64_t n, bool aligned, const Device& device, const RowChoice* requested = nullptr) {
    BackwardPlan plan;
    const int64_t slots = divide_up(n, kSize);
    const auto fits = [&](int held, int threads, int cluster) {
      if (held > most_slots(aligned) || (cluster > 1 && !device.clusters)) return false;
      if (slots > int64_t(held) * std::min(threads, most_threads_of(held, !aligned)) * cluster) return false;
      plan.slots = held, plan.cluster = cluster;
      return true;
    };
    // Layouts are measured, and stand in the table, for rows of one dtype at multiples of 16 bytes. What has more in
    // registers takes the first of these that holds its rows.
    struct Layout {
      int slots, threads, cluster;
    };
    constexpr Layout kLayouts[] = {{1, kTwoBlocks, 1}, {2, kTwoBlocks, 1}, {1, kTwoBlocks, 2}, {2, kTwoBlocks, 2},
                                   {1, kTwoBlocks, 4}, {2, kTwoBlocks, 4}, {1, kTwoBlocks, 8}, {2, kTwoBlocks, 8},
                                   {1, 512, 8},        {2, 512, 8},        {2, 512, 16},       {4, 512, 16},
                                   {2, 512, 1},        {4, 512, 1}};
    const RowChoice* choice = requested ? requested : choice_for(FUSELINE_LAYER_NORM_BACKWARD, sizeof(Y), n);
    const bool measured = requested || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given;
    const bool by_table = choice && choice->stages < 2 && (measured || (aligned && !kWide));
    if (!(by_table && fits(choice->held, choice->block, slots <= kWarp ? 1 : choice->cluster)) && !measured) {
      for (const Layout& layout : kLayouts) {
        // Of an added norm a multiprocessor has one block at a time with two slots.
        if (kAdded && layout.slots > 1 && layout.cluster < kMaxCluster && device.clusters) continue;
        if (fits(layout.slots, layout.threads, layout.cluster)) break;
      }
    }
    if (plan.slots == 0) {
      plan.blocks = int(std::min(rows, std::max<int64_t>(8, divide_up(4 * kLongBlock * device.processors, n))));
      return plan;
    }
    plan.one_warp = slots <= kWarp;
    if (plan.one_warp) plan.slots = 1;
    const int64_t threads = divide_up(slots, int64_t(plan.slots) * plan.cluster);
    plan.threads = plan.one_warp ? power_of_two_from(threads) : int(divide_up(threads, kWarp)) * kWarp;
    const int beside = std::max(1, kWarp / plan.threads);
    const int64_t turns = divide_up(rows, rows_a_turn(plan.slots, !aligned) * beside);
    if (plan.cluster > 1) {
      const int at_once = most_threads_of(plan.slots, !aligned) / kTwoBlocks;  // blocks of a multiprocessor
      const int64_t most = divide_up(int64_t(std::max(1, at_once)) * device.processors, plan.cluster);
      plan.blocks = int(std::min(turns, std::max<int64_t>(1, most)));
      return plan;
    }
    // Few rows are spread over all multiprocessors rather than stacked on some.
    const int64_t spread = divide_up(turns, device.processors) * beside;
    const int room = most_threads_of(plan.slots, !aligned) / plan.threads / beside * beside;
    const int most_groups = plan.one_warp ? room : std::min(room, kMostBarriers);
    plan.groups = int(std::min<int64_t>(std::max(beside, most_groups), spread));
    plan.blocks = int(std::min<int64_t>(device.processors, divide_up(turns, plan.groups / beside)));
    return plan;
  }

  static int64_t blocks(int64_t rows, int64_t n, const Device& device) {
    return std::max(plan(rows, n, true, device).blocks, plan(rows, n, false, device).blocks);
  }

  template <class Kind>
  static int run_held(NormBackward a, BackwardPlan& plan, const Device& device, void* stream) {
    const dim3 block(unsigned(plan.threads), unsigned(plan.groups));
    const int beside = std::max(1, kWarp / plan.threads);
    const size_t columns = size_t(plan.groups / beside) * plan.threads * plan.slots * kSize;
    const size_t parts = a.partials ? kSums * columns * sizeof(float) : 0;
    int count = 0;
    a.cluster = plan.cluster;
    if (plan.cluster > 1) {
      if (plan.cluster > kMaxCluster) {
        cudaFuncSetAttribute(norm_backward_held<Kind>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      }
      const cudaError_t error =
          resident_clusters(norm_backward_held<Kind>, device, plan.threads, parts, plan.cluster, count);
      if (error != cudaSuccess && plan.cluster <= kMaxCluster) return int(error);
      if (error != cudaSuccess || count == 0) {  // larger clusters than all devices have
        cudaGetLastError();
        return run_long(a, plan, stream);
      }
      plan.blocks = std::min(plan.blocks, count);
    } else {
      const cudaError_t error =
          resident_clusters(norm_backward_held<Kind>, device, plan.threads * plan.groups, parts, 1, count);
      if (error != cudaSuccess) return int(error);
    }
    const int64_t grid = int64_t(plan.blocks) * plan.cluster;
    return launch(norm_backward_held<Kind>, a, grid, block, parts, plan.cluster, stream, device.clusters);
  }

  // A block for each row, and a thread for each column: the inputs are read twice.
  static int run_long(const NormBackward& a, BackwardPlan& plan, void* stream) {
    plan.slots = 0;
    if (a.wants_rows()) {
      const int error = launch(norm_backward_long<X, Y>, a, a.rows, dim3(kLongBlock), 0, 1, stream);
      if (error) return error;
    }
    if (!a.partials) return 0;
    const dim3 grid(unsigned(divide_up(a.n, kLongBlock)), unsigned(plan.blocks));
    norm_partials_long<X, Y><<<grid, kLongBlock, 0, static_cast<cudaStream_t>(stream)>>>(a);
    return int(cudaGetLastError());
  }

  static int run(const NormBackward& a, const Device& device, void* stream, const RowChoice* requested) {
    const bool aligned = in_vectors<kSize>(a);
    if (requested && !aligned) return FUSELINE_UNSUPPORTED;
    BackwardPlan plan = BackwardFamily::plan(a.rows, a.n, aligned, device, requested);
    if (plan.slots == 0 && (requested || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given)) return FUSELINE_UNSUPPORTED;
    const int error = run_rows(a, plan, aligned, device, stream);
    if (error || !a.partials) return error;
    return add_partials<Y>(a, kSums, plan.blocks, plan.slots > 0 && device.clusters, stream);
  }

  static int run_rows(const NormBackward& a, BackwardPlan& plan, bool aligned, const Device& device, void* stream) {
    if (plan.slots == 0) return run_long(a, plan, stream);
    if (!aligned) {
      if (plan.one_warp) return run_held<Kind<1, true, true>>(a, plan, device, stream);
      return plan.slots == 1 ? run_held<Kind<1, false, true>>(a, plan, device, stream)
                             : run_held<Kind<2, false, true>>(a, plan, device, stream);
    }
    if (plan.one_warp) return run_held<Kind<1, true, false>>(a, plan, device, stream);
    if (plan.slots == 1) return run_held<Kind<1, false, false>>(a, plan, device, stream);
    if constexpr (kMostSlots == 4) {
      if (plan.slots == 4) return run_held<Kind<4, false, false>>(a, plan, device, stream);
    }
    return run_held<Kind<2, false, false>>(a, plan, device, stream);
  }
};

}  // namespace fuseline
