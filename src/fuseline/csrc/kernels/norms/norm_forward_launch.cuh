// The host's half of the norms' forward: which kernel takes a row length, and its launch.
#pragma once

#include "rows/choice.h"
#include "norm_forward_long.cuh"
#include "norm_forward_rows.cuh"

namespace fuseline {

// Most slots that a thread of a block that ends with its row holds: registers for them leave room for 1024 threads a
// multiprocessor. / 2 and / 4 of it are there for short rows, / 4 for few.
template <class X, class Y, bool kAdded>
constexpr int kMostHeld = (sizeof(Y) == 4 ? 8 : 4) / (kAdded ? 2 : 1);
template <class X, class Y, bool kAdded>
constexpr int kLeastHeld = kMostHeld<X, Y, kAdded> < 4 ? 1 : kMostHeld<X, Y, kAdded> / 4;

enum class ForwardWay { rows, waiting, streamed };

struct ForwardPlan {
  ForwardWay way = ForwardWay::rows;
  int held = 0;           // slots a thread has
  bool one_warp = false;  // has the whole row
  int threads = 0;        // share a row, in one block
  int rows = 1;           // a block has at a time
  int cluster = 1;        // blocks share a row
  size_t shared = 0;
};

template <class X, class Y, bool kAdded>
ForwardPlan plan_forward(int64_t rows, int64_t n, bool aligned, const Device& device) {
  ForwardPlan plan;
  constexpr int kSize = kVector<Y>, kMost = kMostHeld<X, Y, kAdded>, kLeast = kLeastHeld<X, Y, kAdded>;
  // The table is for rows of one dtype. What a thread holds is counted in slots, those of Y; rows of X that the table does
  // not know, or that have rows ahead there, wait in shared memory.
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, sizeof(Y), n);
  const RowChoice* const of_bytes = choice_for(FUSELINE_LAYER_NORM_FORWARD, sizeof(X), n);
  const int64_t slots = aligned ? n / kSize : divide_up(n + kSize - 1, kSize);
  const bool one_warp = slots <= kWarp * kMost;
  constexpr int64_t kRegisters = int64_t(kMostThreads) * 4 * 16;  // bytes of a row that a block's registers hold
  const bool wants_waiting = !of_bytes || (of_bytes->stages > 0 && (aligned || n * int64_t(sizeof(X)) > kRegisters));
  if (slots > int64_t(kMostThreads) * kMost || (wants_waiting && !one_warp)) {
    constexpr int kBytes = kWaitingBytes<X, Y, kAdded>, kParts = kVector<X>;
    const int64_t parts = divide_up(n + kParts - 1, kParts);
    const NormWaiting waiting = plan_norm_waiting(parts * kBytes, sizeof(Moments) * 2 * kMaxStates + 64, device);
    if (n <= (int64_t(1) << 30) && waiting.threads > 0) {
      plan.way = ForwardWay::waiting;
      plan.threads = waiting.threads, plan.cluster = waiting.cluster;
      const auto each = [&] { return divide_up(parts, plan.cluster); };
      if (rows < device.processors) {  // few rows: more blocks for each, and more threads
        while (device.clusters && plan.cluster < kMaxCluster && rows * plan.cluster * 2 <= device.processors &&
               each() >= 2 * kMostThreads) {
          plan.cluster *= 2;
        }
        plan.threads = int(std::min<int64_t>(kMostThreads, divide_up(each(), kWarp) * kWarp));
      }
      plan.shared = size_t(each()) * kBytes;
      return plan;
    }
    plan.way = ForwardWay::streamed;
    plan.threads = kMostThreads;
    while (device.clusters && plan.cluster < kMaxCluster && parts > int64_t(plan.cluster) * kMostThreads * kPiece) {
      plan.cluster *= 2;
    }
    return plan;
  }
  // Few rows: each is spread over more threads, so that all multiprocessors have some.
  const bool few = rows * slots <= int64_t(device.processors) * 2048 * kLeast;
  plan.one_warp = one_warp && !(few && aligned && slots > kWarp * kLeast);
  plan.held = kMost;
  if (plan.one_warp) {
    if (aligned) {
      const int held = choice ? power_of_two_from(choice->held) : kMost;
      plan.held = few ? kLeast : std::max(kLeast, std::min(kMost, held));
      while (plan.held * kWarp < slots) plan.held *= 2;
    } else {
      plan.held = kMost;
    }
    plan.threads = power_of_two_from(divide_up(slots, plan.held));
    const int beside = kWarp / plan.threads;  // whole warps
    const int64_t spread = divide_up(divide_up(rows, device.processors), beside) * beside;
    plan.rows = int(std::min<int64_t>(kShortRowBlock / plan.threads, spread));
    return plan;
  }
  if (few && aligned && slots <= int64_t(kMostThreads) * kLeast) plan.held = kLeast;
  plan.threads = int(divide_up(divide_up(slots, plan.held), kWarp)) * kWarp;
  return plan;
}

template <class X, class Y, bool kAdded>
auto forward_kernel(const ForwardPlan& plan, bool aligned) -> void (*)(NormForward) {
  constexpr int kMost = kMostHeld<X, Y, kAdded>, kLeast = kLeastHeld<X, Y, kAdded>;
  constexpr int kHalf = kMost / 2;
  if (plan.way == ForwardWay::waiting) return norm_forward_waiting<X, Y, kAdded>;
  if constexpr (!std::is_same_v<X, Y>) {
    if (aligned && !plan.one_warp) {
      return plan.held == kMost ? norm_forward_rows<X, Y, kAdded, kMost, true, false>
                                : norm_forward_rows<X, Y, kAdded, kLeast, true, false>;
    }
    if (aligned && plan.held == kMost) return norm_forward_rows<X, Y, kAdded, kMost, true, true>;
    if (aligned && plan.held == kHalf) return norm_forward_rows<X, Y, kAdded, kHalf, true, true>;
    if (aligned) return norm_forward_rows<X, Y, kAdded, kLeast, true, true>;
  }
  return norm_forward_rows<X, Y, kAdded, kMost, false, false>;
}

// norm_forward_streamed, in norms/norm_forward_streamed.cu; a.cluster blocks of so many threads share a row.
template <class X, class Y>
int streamed_forward(const NormForward& a, int threads, void* stream);

template <class X, class Y, bool kAdded>
int run_forward(NormForward a, const Device& device, void* stream) {
  // Rows of one dtype that keep to 16-byte steps are held elsewhere (norm_forward_held.cuh): those left are treated as any other.
  bool aligned = !std::is_same_v<X, Y> && a.n % kVector<Y> == 0;
  for (const void* tensor : {a.x, a.residual, a.x_bias, a.weight, a.bias, static_cast<const void*>(a.y),
                             static_cast<const void*>(a.sum)}) {
    aligned = aligned && offset_in_vector(tensor) == 0;
  }
  const ForwardPlan plan = plan_forward<X, Y, kAdded>(a.rows, a.n, aligned, device);
  a.cluster = plan.cluster;
  if (plan.way == ForwardWay::streamed) return streamed_forward<X, Y>(a, plan.threads, stream);
  const auto kernel = forward_kernel<X, Y, kAdded>(plan, aligned);
  if (plan.way == ForwardWay::waiting) {
    int count = 0;
    const cudaError_t error = resident_clusters(kernel, device, plan.threads, plan.shared, plan.cluster, count);
    if (error != cudaSuccess) return int(error);
    if (count == 0) return FUSELINE_UNSUPPORTED;
  }
  const int64_t grid = divide_up(a.rows, plan.rows) * plan.cluster;
  const dim3 block(unsigned(plan.threads), unsigned(plan.rows));
  const bool early = device.clusters && plan.way == ForwardWay::rows;
  return launch(kernel, a, grid, block, plan.shared, plan.cluster, stream, early);
}

}  // namespace fuseline
