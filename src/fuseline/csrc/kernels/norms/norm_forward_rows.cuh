// The norms' forward for rows that threads hold in registers: y = (x - mean) * rstd * weight + bias over each row (mean 0
// in an RMS norm), of x or of a sum that is made on the way and returned, too: sum = residual + dropout(x + x_bias),
// rounded to the residual's dtype. y may be of fewer bits than what is normalized.
//
// Moves: x (and residual) read once, y (and sum) written once; weight and bias come from cache. Does: about 12
// operations an element, and 15 more for a mask. Limit: HBM bandwidth.
//
// Threads: a row belongs to a part of a warp, a warp or a block, kHeld slots a thread, and the block ends with its row.
// Rows stay packed as they came, and are unpacked for each pass: so more of them are on their way at a time.
#pragma once

#include "norm_elements.cuh"
#include "slot.cuh"

namespace fuseline {

// Blocks a multiprocessor has at least, by the registers that a thread holds rows in. Rows whose elements have addresses apart
// take the registers that they need.
constexpr int forward_blocks(bool aligned, bool one_warp, int registers) {
  if (!aligned) return 1;
  return one_warp ? (registers <= 8 ? 6 : registers <= 16 ? 5 : 4) : 2;
}

// kAdded: of a sum; where rows are not aligned, of a sum or of x.
template <class X, class Y, bool kAdded, int kHeld, bool kAligned, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp),
                                  forward_blocks(kAligned, kOneWarp, kHeld * kVector<Y> * (kAdded ? 2 : 1)))
    norm_forward_rows(const NormForward a) {
  __shared__ Moments shared[2 * kMaxStates];
  let_next_start();
  wait_for_earlier();
  Group<Moments, kOneWarp> group(shared, 1);
  constexpr int kSize = kVector<Y>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
  int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const int inside = row < a.rows ? n : 0;
  Y* y = static_cast<Y*>(a.y) + row * a.n;
  const int head = kAligned ? 0 : elements_into_vector(y);
  int start = group.lane * kSize - head;
  Slot<X, kSize> held[kHeld];
  const bool added = kAdded && (kAligned || a.residual);
  const X* const normalized = static_cast<const X*>(added ? a.residual : a.x) + row * a.n;
  const bool vectors = kAligned || in_vectors(normalized, head);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) held[k].template load<kAligned>(normalized, start + k * step, inside, vectors);
  if (added) {
    Slot<Y, kSize> branch[kHeld];
    const Y* const x = static_cast<const Y*>(a.x) + row * a.n;
    X* const sum = static_cast<X*>(a.sum) + row * a.n;
    const bool x_vectors = kAligned || in_vectors(x, head), sum_vectors = kAligned || in_vectors(sum, head);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) branch[k].template load<kAligned>(x, start + k * step, inside, x_vectors);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float values[kSize], residual[kSize];
      branch[k].values(values);
      held[k].values(residual);
      add_residual<Y, kAligned>(a, row, start + k * step, inside, residual, values);
      held[k].set(values);
      store_slot<X, kAligned>(sum, start + k * step, inside, sum_vectors, values);
    }
  }
  float count = float(n), mean = 0.f;
  if (!group.in_one_warp()) {  // of this warp's elements
    const int first = start - group.lane % kWarp * kSize;
    int mine = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) mine += count_inside<kWarp * kSize>(first + k * step, inside);
    count = float(mine);
  }
  if (a.centred) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float values[kSize];
      held[k].values(values);  // zeros outside the row
      if constexpr (kAdded) {  // or what bias and mask left there
        each_inside<kSize>(start + k * step, inside, [&](int i) { sum += values[i]; });
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum += values[i];
      }
    }
    mean = count > 0.f ? group.warp_sum(sum) / count : 0.f;
  }
  float2 sums = make_float2(0.f, 0.f);  // of distances from the mean, and of their squares
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float values[kSize];
    held[k].forget_values();
    held[k].values(values);
    each_inside<kSize>(start + k * step, inside, [&](int i) {
      const float apart = values[i] - mean;
      sums.x += apart;
      sums.y += apart * apart;
    });
  }
  sums = group.warp_sum(sums);
  const Moments warp =
      a.centred ? corrected(mean, sums.x, sums.y, count) : Moments{0.f, sums.y, count, 0.f};
  const Moments whole =
      group.in_one_warp() ? warp : combine(group.publish(warp), group.states, float(n), a.centred);
  const float rstd = rstd_of(a, whole);
  if (row >= a.rows) return;
  forget(start);
  forget(row);
  if (group.lane == 0) keep_statistics(a, row, whole.mean, rstd);
  y = static_cast<Y*>(a.y) + row * a.n;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float values[kSize];
    held[k].forget_values();
    held[k].values(values);
    normalize<Y, kAligned>(a, start + k * step, n, whole.mean, rstd, values);
    store_slot<Y, kAligned>(y, start + k * step, n, true, values);
  }
}

}  // namespace fuseline
