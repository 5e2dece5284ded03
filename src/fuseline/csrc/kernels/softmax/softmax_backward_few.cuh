// The gradient of softmax for rows that keep to 16-byte steps, so few that all their threads run at once: the same results as
// softmax_backward_rows.
//
// Moves: grad_out and y read once, grad_x written once. Limit and threads: as in softmax_forward_few.cuh.
#pragma once

#include "softmax_few.cuh"
#include "softmax_gradient.cuh"

namespace fuseline {

struct FewBackward {
  const uint4* grad_out;
  const uint4* y;
  uint4* grad_x;
  int64_t rows;
  int vectors, cluster;
  float scale;
};

template <class T, int kHeld, Meet kHow>
__global__ void __launch_bounds__(kMostThreads, 2) softmax_backward_few(const FewBackward a) {
  __shared__ FewRoom<Sums<T>, kHow> room;
  let_next_start();
  FewSeat<Sums<T>, kHow> seat(room, a.cluster);
  const int slot = seat.slot(kHeld), step = seat.threads;
  const int64_t at = seat.row * a.vectors + slot;
  const uint4* const grad_out = a.grad_out + at;
  const uint4* const y = a.y + at;
  uint4* const grad_x = a.grad_x + at;
  const int inside = seat.row < a.rows ? a.vectors - slot : 0;  // vectors of the row from the thread's first on
  const float scale = a.scale;
  known_by_now(number(grad_out) + number(y) + number(grad_x) + uint64_t(inside));
  wait_for_earlier();
  uint4 grad_raw[kHeld], y_raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    grad_raw[k] = y_raw[k] = make_uint4(0, 0, 0, 0);
    if (k * step < inside) grad_raw[k] = load_now(grad_out + k * step), y_raw[k] = load_now(y + k * step);
  }
  Sums<T> sums{};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) sums = plus(sums, sums_of<T>(grad_raw[k], y_raw[k]));
  sums = sum_of_lanes(sums, seat.width);
  if constexpr (kHow != Meet::kOne) {
    seat.meet(sums);
    const Sums<T>* const of_warps = room.states;
    if constexpr (kHow == Meet::kFour) {
      Sums<T> four[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        four[w] = of_warps[w];
        if (w >= seat.warps()) four[w] = Sums<T>{};
      }
      sums = plus(plus(four[0], four[1]), plus(four[2], four[3]));
    } else {
      constexpr int kReaders = kHow == Meet::kBlock ? kMostThreads / kWarp : kWarp;
      sums = Sums<T>{};
#pragma unroll 1
      for (int i = seat.lane % kReaders; i < seat.count(); i += kReaders) sums = plus(sums, of_warps[i]);
      sums = sum_of_lanes(sums, kReaders);
    }
  }
  const float mean = mean_of(sums);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k * step >= inside) continue;
    float result[kVector<T>];
    gradient<T>(grad_raw[k], y_raw[k], mean, scale, result);
    store_now(grad_x + k * step, pack<T>(result));
  }
}

// ---- host ----

template <class T>
auto few_backward_kernel(const SoftmaxPlan& plan) -> void (*)(FewBackward) {
  switch (meeting_of(plan.shape)) {
    case Meet::kOne:
      return plan.held == 1 ? softmax_backward_few<T, 1, Meet::kOne> : softmax_backward_few<T, 2, Meet::kOne>;
    case Meet::kFour:
      return softmax_backward_few<T, 1, Meet::kFour>;
    case Meet::kBlock:
      return softmax_backward_few<T, 1, Meet::kBlock>;
    default:
      return plan.held == 1 ? softmax_backward_few<T, 1, Meet::kCluster> : softmax_backward_few<T, 2, Meet::kCluster>;
  }
}

}  // namespace fuseline
