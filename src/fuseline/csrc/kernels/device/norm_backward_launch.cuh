// The host's half of the norms' backward: how the kernel is laid out for a length, and its launches.
#pragma once

#include "choice.h"
#include "norm_backward.cuh"
#include "norm_backward_held.cuh"
#include "norm_sums.cuh"
#include "resident.cuh"

namespace fuseline {

struct BackwardPlan {
  bool many = false;      // columns a thread: kManyColumns or kFewColumns
  int threads = 0;        // share a row, in one block
  bool one_warp = false;  // and are of one warp
  int rows = 1;           // a block has at a time
  int cluster = 1;        // blocks share a row
  int stages = kMostStages;
  int blocks = 0;         // in the grid, each with partial sums of its own (a cluster counts once)
  bool fits = true;       // or take the kernels for long rows
};

// How rows are held in registers: slots of a thread, threads of a row, and rows of a block at a time.
struct HeldPlan {
  int slots = 0;  // 0: they are too long
  int threads = 0;
  bool one_warp = false;
  int groups = 1;  // of threads in a block, each with rows of its own
  int blocks = 0;
};

constexpr int kHeldBlock = 512;  // with it a thread has 128 registers
constexpr int kHeldThreads = 256;  // of a row at most: two groups a block or more, and one works while the other waits

// The kinds of one family whose rows are held. Four rows a turn where their slots are 16 bytes of two tensors, fewer
// where they are more.
template <class X, class Y, int kSums, bool kCentred>
struct HeldFamily {
  static constexpr bool kAdded = kSums == kSumsOfAddedNorm;
  static constexpr bool kWide = kAdded || sizeof(X) > sizeof(Y);
  static constexpr int kSize = kVector<Y>;

  static constexpr int rows_a_turn(int slots, bool shifted) {
    return shifted ? (kWide ? 1 : 2) : (kWide ? 2 : 4) / slots;
  }
  template <int kSlots, bool kOneWarp, bool kShifted>
  using Kind = HeldKind<X, Y, kSlots, rows_a_turn(kSlots, kShifted), kHeldBlock, kSums, kCentred, kOneWarp, kShifted>;

  static HeldPlan plan(int64_t rows, int64_t n, bool aligned, const Device& device) {
    HeldPlan plan;
    const int64_t slots = divide_up(n, kSize);
    const int most_slots = aligned && !kAdded ? 2 : 1;  // the sums of more columns leave no room for three kinds
    if (slots > int64_t(kHeldThreads) * most_slots) return plan;
    plan.slots = slots > kHeldThreads ? 2 : 1;
    plan.one_warp = slots <= kWarp;
    const int64_t threads = divide_up(slots, plan.slots);
    plan.threads = plan.one_warp ? power_of_two_from(threads) : int(divide_up(threads, kWarp)) * kWarp;
    const int beside = std::max(1, kWarp / plan.threads);
    const int rows_of_group = rows_a_turn(plan.slots, !aligned);
    const int64_t turns = divide_up(rows, rows_of_group * beside);
    // Few rows are spread over all multiprocessors rather than stacked on some.
    const int64_t spread = divide_up(turns, device.processors) * beside;
    plan.groups = int(std::min<int64_t>(kHeldBlock / plan.threads, spread));
    plan.blocks = int(std::min<int64_t>(device.processors, divide_up(turns, plan.groups / beside)));
    return plan;
  }

  template <class Kind>
  static int launch_kind(const NormBackward& a, const HeldPlan& plan, void* stream) {
    const dim3 block(unsigned(plan.threads), unsigned(plan.groups));
    const int beside = std::max(1, kWarp / plan.threads);
    const size_t parts = size_t(plan.groups / beside) * plan.threads * plan.slots * kSize * sizeof(float);
    return launch(norm_backward_held<Kind>, a, plan.blocks, block, parts, 1, stream);
  }

  static int run(const NormBackward& a, const HeldPlan& plan, bool aligned, void* stream) {
    if (!aligned) {
      return plan.one_warp ? launch_kind<Kind<1, true, true>>(a, plan, stream)
                           : launch_kind<Kind<1, false, true>>(a, plan, stream);
    }
    if constexpr (!kAdded) {
      if (plan.slots == 2) return launch_kind<Kind<2, false, false>>(a, plan, stream);
    }
    return plan.one_warp ? launch_kind<Kind<1, true, false>>(a, plan, stream)
                         : launch_kind<Kind<1, false, false>>(a, plan, stream);
  }
};

// The kinds of one family: plain norms have `kMany`, and where they add nothing, more columns to a thread.
template <class T, int kSums, bool kCentred>
struct BackwardFamily {
  static constexpr bool kAdded = kSums == kSumsOfAddedNorm;
  template <bool kMany, bool kOneWarp, bool kShifted>
  using Kind = BackwardKind<T, kMany ? kManyColumns<T> : kFewColumns<T>, kOneWarp, kShifted, kSums, kCentred>;

  static int block_of(const BackwardPlan& plan, bool aligned) {
    if (!aligned) return plan.one_warp ? Kind<false, true, true>::kBlock : Kind<false, false, true>::kBlock;
    if constexpr (!kAdded) {
      if (plan.many) return plan.one_warp ? Kind<true, true, false>::kBlock : Kind<true, false, false>::kBlock;
    }
    return plan.one_warp ? Kind<false, true, false>::kBlock : Kind<false, false, false>::kBlock;
  }

  // Two rows or more to a block where a cluster can take the rest of them: one is worked on while the other meets, and
  // both read the same weights.
  static BackwardPlan plan(int64_t rows, int64_t n, bool aligned, const Device& device) {
    BackwardPlan plan;
    constexpr int kFew = kFewColumns<T>;
    const RowOverride& measured = row_overrides[FUSELINE_LAYER_NORM_BACKWARD];
    plan.many = aligned && !kAdded && n > kWarp * kFew;
    const int columns = plan.many ? kManyColumns<T> : kFew;
    int64_t threads = divide_up(n, columns);
    plan.one_warp = threads <= kWarp;
    int most = block_of(plan, aligned);
    if (measured.given) {
      plan.cluster = plan.one_warp ? 1 : measured.choice.cluster;
      plan.stages = measured.choice.stages;
      most = std::min(most, measured.choice.block);
    }
    const bool may_grow = !measured.given && device.clusters;
    while (may_grow && plan.cluster < kMaxCluster && threads > int64_t(plan.cluster) * (most / 2)) plan.cluster *= 2;
    threads = divide_up(threads, plan.cluster);
    if (!plan.one_warp) threads = std::max<int64_t>(threads, 2 * kWarp);
    plan.fits = threads <= most;
    if (!plan.fits) {
      plan.cluster = 1;
      plan.blocks = int(std::min<int64_t>(rows, device.processors));
      return plan;
    }
    plan.threads = int(plan.one_warp ? power_of_two_from(threads) : divide_up(threads, kWarp) * kWarp);
    // Whole warps, and few rows spread over all multiprocessors rather than stacked on some.
    const int a_warp = std::max(1, kWarp / plan.threads);
    const int places = std::max(1, device.processors / plan.cluster);
    const int64_t spread = divide_up(divide_up(rows, places), a_warp) * a_warp;
    plan.rows = int(std::min<int64_t>(most / plan.threads, spread));
    plan.blocks = int(std::min<int64_t>(places, divide_up(rows, plan.rows)));
    return plan;
  }

  using Held = HeldFamily<T, T, kSums, kCentred>;

  static int64_t blocks(int64_t rows, int64_t n, const Device& device) {
    const auto of = [&](bool aligned) {
      const HeldPlan held = Held::plan(rows, n, aligned, device);
      return held.slots ? held.blocks : plan(rows, n, aligned, device).blocks;
    };
    return std::max(of(true), of(false));
  }

  static int run(const NormBackward& a, const Device& device, void* stream);
};

template <class T, class Kind>
int run_backward_rows(NormBackward a, BackwardPlan& plan, const Device& device, void* stream) {
  constexpr int kStatistics = kMostStages * Kind::kBlock / kWarp * int(sizeof(float2));
  constexpr int kRoom = int(sizeof(MeetingRoom<float2, Kind::kRows, kMaxStates>));
  constexpr int kStatic = (Kind::kOneWarp ? int(sizeof(float2)) * Kind::kBlock / kWarp : kStatistics + kRoom) + 64;
  const int room = device.shared_a_block - kStatic;
  const int all = plan.threads * plan.rows, width = std::min(plan.threads, kWarp);
  const int slots = Kind::kShifted ? all / width * (width + 1) : Kind::kBlock;
  const int stage = Kind::kTensors * (Kind::kColumns / kVector<T>)*slots * 16;
  a.stages = std::max(Kind::kOneWarp ? 1 : 2, std::min(plan.stages, room / stage));
  a.cluster = plan.cluster;
  const dim3 block(unsigned(plan.threads), unsigned(plan.rows));
  return launch_resident<norm_backward_rows<T, Kind>>(a, plan.blocks, block, plan.cluster, size_t(a.stages) * stage,
                                                      room, device, stream);
}

template <class T>
int run_backward_long(const NormBackward& a, const BackwardPlan& plan, void* stream) {
  if (a.wants_rows()) {
    const int error = launch(norm_backward_long<T>, a, a.rows, dim3(kLongBlock), 0, 1, stream);
    if (error) return error;
  }
  if (!a.partials) return 0;
  const dim3 grid(unsigned(divide_up(a.n, kLongBlock)), unsigned(plan.blocks));
  const void* x_bias_rows = !a.grad_x_bias ? nullptr : a.dropout.seed ? a.grad_dropped : a.grad_x;
  norm_partials_long<T>
      <<<grid, kLongBlock, 0, static_cast<cudaStream_t>(stream)>>>(a, static_cast<const T*>(x_bias_rows));
  return int(cudaGetLastError());
}

template <class T, int kSums, bool kCentred>
int BackwardFamily<T, kSums, kCentred>::run(const NormBackward& a, const Device& device, void* stream) {
  bool aligned = a.n % kVector<T> == 0;
  for (const void* tensor : {a.grad_y, a.grad_sum, a.x, a.weight, static_cast<const void*>(a.grad_x),
                             static_cast<const void*>(a.grad_dropped)}) {
    aligned = aligned && offset_in_vector(tensor) == 0;
  }
  const HeldPlan held = Held::plan(a.rows, a.n, aligned, device);
  if (held.slots) {
    const int error = Held::run(a, held, aligned, stream);
    return error || !a.partials ? error : add_partials<T>(a, kSums, held.blocks, device.clusters, stream);
  }
  BackwardPlan plan = BackwardFamily::plan(a.rows, a.n, aligned, device);
  int error = 0;
  if (!plan.fits) {
    error = run_backward_long<T>(a, plan, stream);
  } else if (!aligned) {
    error = plan.one_warp ? run_backward_rows<T, Kind<false, true, true>>(a, plan, device, stream)
                          : run_backward_rows<T, Kind<false, false, true>>(a, plan, device, stream);
  } else if (!plan.many) {
    if (plan.one_warp) {
      error = run_backward_rows<T, Kind<false, true, false>>(a, plan, device, stream);
    } else if constexpr (kAdded) {
      error = run_backward_rows<T, Kind<false, false, false>>(a, plan, device, stream);
    }
  } else if constexpr (!kAdded) {
    error = plan.one_warp ? run_backward_rows<T, Kind<true, true, false>>(a, plan, device, stream)
                          : run_backward_rows<T, Kind<true, false, false>>(a, plan, device, stream);
  }
  if (error || !a.partials) return error;
  return add_partials<T>(a, kSums, plan.blocks, plan.fits && device.clusters, stream);
}

}  // namespace fuseline
