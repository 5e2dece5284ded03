// Softmax without a mask at a scale above 0, of rows of 16 bits that keep to 16-byte steps, so few that all their threads run at
// once: the same results as softmax_forward_rows.
//
// Moves: x read once, y written once. Limit: what a row waits for, one after the other: its elements, their maximum and sum in
// a warp, those of all warps. Addresses are there before the kernel ahead has ended; a row of many warps is spread over the
// blocks of a cluster.
#pragma once

#include "device/packed_rows.cuh"
#include "device/powers.cuh"
#include "softmax.cuh"
#include "softmax_few.cuh"

namespace fuseline {

struct FewForward {
  const uint4* x;
  uint4* y;
  int64_t rows;
  int vectors, cluster;
  float unit;
};

// The largest element of a warp, and the sum of the powers against it.
struct alignas(8) Peak {
  float max, sum;
};

template <class T, int kHeld, Meet kHow>
__global__ void __launch_bounds__(kMostThreads, 2) softmax_forward_few(const FewForward a) {
  constexpr int kSize = kVector<T>;
  __shared__ FewRoom<Peak, kHow> room;
  let_next_start();
  FewSeat<Peak, kHow> seat(room, a.cluster);
  const int slot = seat.slot(kHeld), step = seat.threads;
  const uint4* const x = a.x + seat.row * a.vectors + slot;
  uint4* const y = a.y + seat.row * a.vectors + slot;
  const int inside = seat.row < a.rows ? a.vectors - slot : 0;  // vectors of the row from the thread's first on
  const float unit = a.unit;
  known_by_now(number(x) + number(y) + uint64_t(inside));
  wait_for_earlier();
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    raw[k] = make_uint4(kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>);
    if (k * step < inside) raw[k] = load_now(x + k * step);
  }
  uint32_t most = larger<T>(larger<T>(raw[0].x, raw[0].y), larger<T>(raw[0].z, raw[0].w));
#pragma unroll
  for (int k = 1; k < kHeld; ++k) {
    most = larger<T>(most, larger<T>(larger<T>(raw[k].x, raw[k].y), larger<T>(raw[k].z, raw[k].w)));
  }
  float max = largest_of<T>(most);
  if (kHow != Meet::kOne || seat.width == kWarp) {
    max = largest_of_warp(max);
  } else {
#pragma unroll
    for (int by = kWarp / 2; by > 0; by /= 2) {
      if (by < seat.width) max = fmaxf(max, from_lane(max, by));
    }
  }
  const Top<T> top(max, unit);
  float value[kHeld][kSize], sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    unpack<T>(raw[k], value[k]);
    top.raise(value[k], unit);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i % 4] += value[k][i];
  }
  float sum = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]), seat.width), factor = 1.f;
  if constexpr (kHow != Meet::kOne) {
    seat.meet({max, sum});
    const Peak* const peaks = room.states;
    const auto weighed = [&](const Peak& peak, const Top<T>& whole) {  // NaN stays NaN
      return peak.sum * (peak.max > -kInfinity ? whole.rebased(Top<T>(peak.max, unit), unit) : 0.f);
    };
    float largest = -kInfinity;
    if constexpr (kHow == Meet::kFour) {
      Peak four[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        four[w] = peaks[w];
        if (w >= seat.warps()) four[w] = {-kInfinity, 0.f};
      }
      largest = fmaxf(fmaxf(four[0].max, four[1].max), fmaxf(four[2].max, four[3].max));
      const Top<T> whole(largest, unit);
      sum = (weighed(four[0], whole) + weighed(four[1], whole)) + (weighed(four[2], whole) + weighed(four[3], whole));
      factor = max > -kInfinity ? whole.rebased(top, unit) : 0.f;
    } else {
      constexpr int kReaders = kHow == Meet::kBlock ? kMostThreads / kWarp : kWarp;
      const int first = seat.lane % kReaders;
      Peak mine{-kInfinity, 0.f};
      if (first < seat.count()) mine = peaks[first];
      largest = mine.max;
      if constexpr (kHow == Meet::kCluster) {
#pragma unroll 1
        for (int i = first + kReaders; i < seat.count(); i += kReaders) largest = fmaxf(largest, peaks[i].max);
      }
      const Top<T> whole(largest_of_warp(largest), unit);
      sum = weighed(mine, whole);
      if constexpr (kHow == Meet::kCluster) {
#pragma unroll 1
        for (int i = first + kReaders; i < seat.count(); i += kReaders) sum += weighed(peaks[i], whole);
      }
      sum = sum_of_lanes(sum, kReaders);
      factor = max > -kInfinity ? whole.rebased(top, unit) : 0.f;
    }
  }
  const float share = sum == 0.f ? 0.f : __fdividef(factor, sum);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k * step >= inside) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) value[k][i] *= share;
    store_now(y + k * step, pack<T>(value[k]));
  }
}

// ---- host ----

template <class T>
auto few_forward_kernel(const SoftmaxPlan& plan) -> void (*)(FewForward) {
  switch (meeting_of(plan.shape)) {
    case Meet::kOne:
      return plan.held == 1 ? softmax_forward_few<T, 1, Meet::kOne> : softmax_forward_few<T, 2, Meet::kOne>;
    case Meet::kFour:
      return softmax_forward_few<T, 1, Meet::kFour>;
    case Meet::kBlock:
      return softmax_forward_few<T, 1, Meet::kBlock>;
    default:
      return plan.held == 1   ? softmax_forward_few<T, 1, Meet::kCluster>
             : plan.held == 2 ? softmax_forward_few<T, 2, Meet::kCluster>
                              : softmax_forward_few<T, 4, Meet::kCluster>;
  }
}

template <class T>
int run_few(const SoftmaxForward& a, const SoftmaxPlan& plan, const Device& device, void* stream) {
  const FewForward few{static_cast<const uint4*>(a.x), static_cast<uint4*>(a.y), a.rows, int(a.n / kVector<T>),
                       plan.shape.cluster, a.scale * 1.4426950408889634f};
  return launch(few_forward_kernel<T>(plan), few, plan.shape, device, stream);
}

}  // namespace fuseline
