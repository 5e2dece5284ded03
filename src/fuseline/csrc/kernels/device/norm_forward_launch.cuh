// The host's half of the norms' forward: which kernel takes a row length, and its launch.
#pragma once

#include "choice.h"
#include "norm_forward.cuh"
#include "resident.cuh"

namespace fuseline {

// Most vectors a thread of a block that ends with its row holds: 32 values, or 16 of x and 16 of the residual, leave
// room for 1024 threads a multiprocessor. / 2 and / 4 of it are there for short rows.
template <class T, bool kAdded>
constexpr int kMostHeld = (kAdded ? 16 : 32) / kVector<T>;

struct ForwardPlan {
  bool ring = false;
  bool streamed = false;
  int held = 0;           // vectors a thread has
  bool one_warp = false;  // has the whole row
  int threads = 0;        // share a row, in one block
  int rows = 1;           // a block has at a time
  int cluster = 1;        // blocks share a row
  int stages = 0;
};

// Threads of a row read side by side before one holds more than one vector.
constexpr int kNeighbours = 8;

template <class T, bool kAdded>
ForwardPlan plan_forward(int64_t rows, int64_t n, bool aligned, const Device& device) {
  ForwardPlan plan;
  constexpr int kMost = kMostHeld<T, kAdded>;
  const RowChoice* choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, sizeof(T), n);
  const bool chosen = row_overrides[FUSELINE_LAYER_NORM_FORWARD].given;
  const int64_t vectors = aligned ? n / kVector<T> : divide_up(n + kVector<T> - 1, kVector<T>);
  const bool one_warp = vectors <= kWarp * kMost;
  const bool fits_a_block = vectors <= int64_t(kMostThreads) * kMost;
  const bool wants_ring = !fits_a_block || (choice && choice->stages > 0);
  if (aligned && !one_warp && wants_ring && device.shared_a_block >= 2 * kRingStage<kAdded> + int(sizeof(RingRoom))) {
    plan.ring = true;
    plan.stages = choice && choice->stages > 0 ? choice->stages : kMostStages;
    const int64_t threads = divide_up(vectors, kRingHeld<kAdded>);
    // Several rows to a block: one is worked on while others meet, and all read the same weights.
    const int most = chosen ? choice->block : kRingBlock / 4;
    plan.cluster = chosen ? choice->cluster : 1;
    while (!chosen && device.clusters && plan.cluster < kMaxCluster && threads > int64_t(plan.cluster) * most) {
      plan.cluster *= 2;
    }
    plan.threads = int(divide_up(divide_up(threads, plan.cluster), kWarp)) * kWarp;
    if (plan.threads <= kRingBlock) {
      const int64_t spread = divide_up(rows, std::max(1, device.processors / plan.cluster));
      plan.rows = int(std::min<int64_t>(kRingBlock / plan.threads, spread));
      return plan;
    }
    plan.ring = false;
  }
  if (!fits_a_block) {
    plan.streamed = true;
    plan.threads = 512;
    while (device.clusters && plan.cluster < kMaxCluster && vectors > int64_t(plan.cluster) * 512 * kPiece) {
      plan.cluster *= 2;
    }
    return plan;
  }
  plan.one_warp = one_warp;
  plan.held = kMost;
  if (one_warp) {
    if (aligned) {
      plan.held = std::max(1, kMost / 4);
      while (plan.held < kMost && plan.held * kNeighbours < vectors) plan.held *= 2;
    } else {
      plan.held = vectors <= kWarp ? 1 : kMost;
    }
    plan.threads = power_of_two_from(divide_up(vectors, plan.held));
    plan.rows = kShortRowBlock / plan.threads;
    return plan;
  }
  plan.threads = int(divide_up(divide_up(vectors, kMost), kWarp)) * kWarp;
  return plan;
}

template <class T, bool kAdded>
auto forward_kernel(const ForwardPlan& plan, bool aligned) -> void (*)(NormForward) {
  constexpr int kMost = kMostHeld<T, kAdded>, kHalf = kMost / 2, kQuarter = kMost < 4 ? 1 : kMost / 4;
  if (plan.streamed) return norm_forward_streamed<T, kAdded>;
  if (!aligned && plan.held == 1) return norm_forward_rows<T, kAdded, 1, false, true>;
  if (!aligned) return norm_forward_rows<T, kAdded, kMost, false, false>;
  if (!plan.one_warp) return norm_forward_rows<T, kAdded, kMost, true, false>;
  if (plan.held == kMost) return norm_forward_rows<T, kAdded, kMost, true, true>;
  if (plan.held == kHalf) return norm_forward_rows<T, kAdded, kHalf, true, true>;
  return norm_forward_rows<T, kAdded, kQuarter, true, true>;
}

template <class T, bool kAdded>
int run_forward(NormForward a, const Device& device, void* stream) {
  bool aligned = a.n % kVector<T> == 0;
  for (const void* tensor : {a.x, a.residual, a.x_bias, a.weight, a.bias, static_cast<const void*>(a.y),
                             static_cast<const void*>(a.sum)}) {
    aligned = aligned && offset_in_vector(tensor) == 0;
  }
  a.y_vectors = offset_in_vector(a.x) == offset_in_vector(a.y);
  const ForwardPlan plan = plan_forward<T, kAdded>(a.rows, a.n, aligned, device);
  a.cluster = plan.cluster;
  const dim3 block(unsigned(plan.threads), unsigned(plan.rows));
  if (!plan.ring) {
    const int64_t grid = divide_up(a.rows, plan.rows) * plan.cluster;
    return launch(forward_kernel<T, kAdded>(plan, aligned), a, grid, block, 0, plan.cluster, stream);
  }
  const int most_shared = device.shared_a_block - int(sizeof(RingRoom)) - 64;
  a.stages = std::max(2, std::min(plan.stages, most_shared / kRingStage<kAdded>));
  int blocks = int(std::min<int64_t>(std::max(1, device.processors / plan.cluster), divide_up(a.rows, plan.rows)));
  const size_t shared = size_t(a.stages) * kRingStage<kAdded>;
  return launch_resident<norm_forward_ring<T, kAdded>>(a, blocks, block, plan.cluster, shared, most_shared, device,
                                                       stream);
}

}  // namespace fuseline
