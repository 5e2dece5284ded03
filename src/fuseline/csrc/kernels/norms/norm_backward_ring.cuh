// The norms' backward for long rows (sm_90): rows run ahead of the arithmetic through a ring in shared memory.
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth, for which a multiprocessor needs some 64 KB on their way; what
// registers the sums of columns leave cannot hold them, shared memory can.
//
// Threads: one block a multiprocessor, which stays. The blocks of a cluster share a row, or the groups of a block have rows
// of their own. Each warp has neighbouring columns and a ring of its own: one of its lanes sends for its part of a row in
// bulk copies and, once the warp is through with a row, for that which takes its place; no warp waits for another but
// where rows meet. They meet one row behind (meeting.cuh): the sums of a row travel while the next one is read.
#pragma once

#include "device/meeting.cuh"
#include "norm_backward_ring_parts.cuh"

namespace fuseline {

using norm_backward_plans::kMostRingGroups;
using norm_backward_plans::kMostRingStages;

template <class XType, class YType, int kSlotsOfThread, int kSumsOfColumn, bool kCentredRows>
struct RingKind {
  using X = XType;
  using Y = YType;
  static constexpr int kSlots = kSlotsOfThread, kSums = kSumsOfColumn;
  static constexpr bool kCentred = kCentredRows, kAdded = kSumsOfColumn == kSumsOfAddedNorm;
  static constexpr int kSize = kVector<Y>;
  static constexpr int kThreads = norm_backward_plans::ring_threads(kSlots, kAdded);
  static constexpr int kColumns = kWarp * kSlots * kSize;  // of a warp
  template <class T>
  static constexpr int kPart = kColumns * int(sizeof(T));  // bytes of a warp's part of a row
};

// States of the meetings of any number of warps.
struct RingStates {
  float2* first;
  int count;
  __device__ __forceinline__ float2* operator[](int meeting) const { return first + meeting * count; }
};

struct RingRoom {
  RingStates states;
  uint64_t (*barriers)[kMostRingGroups];
};

template <class Kind>
__global__ void __launch_bounds__(Kind::kThreads, 1) norm_backward_ring(const NormBackward a) {
#if __CUDA_ARCH__ >= 900
  using X = typename Kind::X;
  using Y = typename Kind::Y;
  constexpr int kSize = Kind::kSize, kSlots = Kind::kSlots, kSums = Kind::kSums, kColumns = Kind::kColumns;
  constexpr bool kAdded = Kind::kAdded, kCentred = Kind::kCentred;
  constexpr int kStep = kWarp * kSize;  // between the slots of a thread
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kMostRingStages][Kind::kThreads / kWarp];
  __shared__ uint64_t met[kMeetings][kMostRingGroups];

  const int n = int(a.n), stages = a.stages, cluster = a.cluster;
  const int lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp), warps = int(blockDim.x) / kWarp;
  const int group = of_warp(int(threadIdx.y));
  const int rank = int(blockIdx.x) & (cluster - 1);
  const int block = int(blockIdx.x) / cluster, blocks = int(gridDim.x) / cluster;  // a cluster counts once
  // Rows first_row, first_row + groups, ... of those before `rows` are this group's.
  const int64_t share = a.beside ? (a.rows + blocks - 1) / blocks : 0;
  const int groups = a.beside ? int(blockDim.y) : blocks * int(blockDim.y);
  const int64_t first_row = (a.beside ? block * share : int64_t(block) * blockDim.y) + group;
  const int64_t rows = a.beside ? min(a.rows, (block + 1) * share) : a.rows;
  const int from = (rank * warps + warp) * kColumns, start = from + lane * kSize;
  const bool centred = kCentred && (!kAdded || a.centred);
  const bool normalized = sizeof(X) > sizeof(Y) && a.normalized;
  const bool wants_rows = a.wants_rows();
  const bool alone = cluster * warps == 1;           // a row has one warp
  const int behind = stages > 2 && !alone ? 1 : 0;        // rows between the first pass and the second

  const int place = group * warps + warp;  // of this warp's ring
  // Of a warp's part of a row: x, grad_y, grad_sum.
  const int grad_y_at = normalized ? Kind::template kPart<Y> : Kind::template kPart<X>;
  const int grad_sum_at = grad_y_at + Kind::template kPart<Y>;
  const int part_bytes = grad_sum_at + (kAdded ? Kind::template kPart<X> : 0);
  const int stage_bytes = int(blockDim.y) * warps * part_bytes;
  unsigned char* const mine = ring + place * part_bytes;
  const auto stage_at = [&](int stage) { return mine + stage * stage_bytes; };
  const auto fetch = [&](int64_t row, int stage) {
    if (row >= rows) return;
    unsigned char* const to = stage_at(stage);
    uint64_t* const barrier = &arrived[stage][place];
    const auto parts = [&](bool prepare) {
      int bytes = normalized ? fetch_part<Y, kColumns>(a, a.x, row, from, to, barrier, prepare)
                             : fetch_part<X, kColumns>(a, a.x, row, from, to, barrier, prepare);
      bytes += fetch_part<Y, kColumns>(a, a.grad_y, row, from, to + grad_y_at, barrier, prepare);
      if (kAdded && a.grad_sum) {
        bytes += fetch_part<X, kColumns>(a, a.grad_sum, row, from, to + grad_sum_at, barrier, prepare);
      }
      return bytes;
    };
    barrier_expect(barrier, parts(true));
    parts(false);
  };

  // Behind the ring: states of meetings, and weights.
  unsigned char* const behind_ring = ring + stages * stage_bytes;
  const int states_count = int(blockDim.y) * cluster * warps;
  unsigned char* const kept = behind_ring + kMeetings * states_count * int(sizeof(float2));
  const bool wide_weights = (a.weight && a.fp32_weights) || sizeof(Y) == 4;

  let_next_start();
  // By loops of one thread: of a predicated `mbarrier.init` racecheck takes every thread's register for an address.
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) barrier_init(&arrived[stage][place], 1);
  }
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int meeting = 0; meeting < kMeetings; ++meeting) {
      barrier_init(&met[meeting][threadIdx.y], cluster == 1 ? warps : 1);
    }
  }
  publish_barriers();
  if (cluster > 1) cluster_arrive_relaxed();
  __syncwarp();
  wait_for_earlier();
  if (lane == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      fetch(first_row + int64_t(stage) * groups, stage);
    }
  }
  RingRoom room{{reinterpret_cast<float2*>(behind_ring), states_count}, met};
  Meeting<RingRoom, float2> meeting{room, cluster, rank};
  const RingWeights<Kind> weights{reinterpret_cast<uint4*>(kept) + threadIdx.x, wide_weights};
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    if (group == 0) weights.keep(a, k, start + k * kStep);
  }
  if (cluster > 1) {
    cluster_wait();  // the others' barriers are there; weights are each thread's own
  } else {
    __syncthreads();
  }

  const uint64_t seed = kAdded && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  ColumnSums<kSize, kSums> columns[kSlots] = {};
  const auto take_x = [&](const unsigned char* parts, int slot, float (&values)[kSize]) {
    normalized ? take_slot<Y, kSize>(parts, slot).values(values) : take_slot<X, kSize>(parts, slot).values(values);
  };
  const auto statistics = [&](int64_t row, float& mean, float& rstd) {
    const bool there = row < rows;
    forget(row);  // that all lanes have it: a load known to be the same for all is waited for where it stands
    mean = centred && !normalized && there ? a.mean[row] : 0.f;
    rstd = there ? a.rstd[row] : 0.f;
  };
  int stage = 0, parity = 0, before = 0;
  int64_t row = first_row;
  float2 warp_sums = make_float2(0.f, 0.f);
  RowTerms terms;
  float mean, rstd;
  statistics(row, mean, rstd);
#pragma unroll 1
  for (int turn = 0;; ++turn, row += groups) {
    const bool there = row < rows;
    float next_mean, next_rstd;
    statistics(row + groups, next_mean, next_rstd);
    if (there) {
      const unsigned char* const parts = stage_at(stage);
      barrier_wait(&arrived[stage][place], parity);
      float sum = 0.f, product_sum = 0.f;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const int first = start + k * kStep;
        if (first >= n) continue;
        float values[kSize], grad[kSize], weight[kSize];
        weights.take(k, weight);
        take_x(parts, k * kWarp + lane, values);
        take_slot<Y, kSize>(parts + grad_y_at, k * kWarp + lane).values(grad);
        first_pass<kSize, kSums, kCentred>(values, grad, weight, mean, RowTerms::unit(a, rstd), columns[k], sum, product_sum);
      }
      if (wants_rows) {
        warp_sums = sum_over_warp(make_float2(sum, product_sum));
        if (!alone) meeting.publish(turn, warp_sums, group, warp, lane);
      }
    }
    if (!behind) before = stage, terms.mean = mean, terms.rstd = rstd;
    if (behind ? turn > 0 : there) {
      const int64_t done = row - behind * groups;
      if (wants_rows) {
        float2 sums = warp_sums;
        if (!alone) {
          const float2* const states = meeting.await(turn - behind, group);
          sums = make_float2(0.f, 0.f);
#pragma unroll 1
          for (int i = lane; i < meeting.count(); i += kWarp) sums = plus(sums, states[i]);
          sums = sum_over_warp(sums);
        }
        terms.set(a, centred, sums.x, sums.y);
        const unsigned char* const parts = stage_at(before);
        int64_t base = done * a.n;
        forget(base);  // kept, rather than multiplied anew for each store
#pragma unroll
        for (int k = 0; k < kSlots; ++k) {
          const int first = start + k * kStep;
          if (first >= n) continue;
          float values[kSize], grad[kSize], weight[kSize];
          weights.take(k, weight);
          take_x(parts, k * kWarp + lane, values);
          take_slot<Y, kSize>(parts + grad_y_at, k * kWarp + lane).values(grad);
          second_pass<kSize, kCentred>(values, weight, terms, grad);
          if constexpr (kAdded) {
            if (a.grad_sum) {
              take_slot<X, kSize>(parts + grad_sum_at, k * kWarp + lane).values(values);
#pragma unroll
              for (int i = 0; i < kSize; ++i) grad[i] += values[i];
            }
            if (a.grad_x) store_slot<X, kSize>(static_cast<X*>(a.grad_x) + base, first, n, grad);
            if (a.dropout.seed) {
              float multipliers[kSize];
              dropout_multipliers(a.dropout, seed, base + first, multipliers);
#pragma unroll
              for (int i = 0; i < kSize; ++i) grad[i] *= multipliers[i];
            }
            if (a.grad_dropped) store_slot<Y, kSize>(static_cast<Y*>(a.grad_dropped) + base, first, n, grad);
#pragma unroll
            for (int i = 0; i < kSize; ++i) columns[k].x_bias[i] += grad[i];
          } else {
            store_slot<X, kSize>(static_cast<X*>(a.grad_x) + base, first, n, grad);
          }
        }
      }
      __syncwarp();
      if (lane == 0) fetch(done + int64_t(stages) * groups, before);
    }
    if (!there) break;
    before = stage, terms.mean = mean, terms.rstd = rstd;
    mean = next_mean, rstd = next_rstd;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  if (!a.partials) return;
  float* const sums_of_block = a.partials + int64_t(block) * a.columns;
  float* const shared = reinterpret_cast<float*>(ring);
  const int64_t kind_step = int64_t(blocks) * a.columns;
  const auto write = [&](int kind, auto&& column) {
    write_columns<kSize, kStep, kSlots>(sums_of_block + kind * kind_step, shared, start, n, column);
  };
  write(0, [&](int k, int i) { return columns[k].weight[i]; });
  if constexpr (kSums > 1) write(1, [&](int k, int i) { return columns[k].bias[i]; });
  if constexpr (kAdded) write(2, [&](int k, int i) { return columns[k].x_bias[i]; });
#endif
}

}  // namespace fuseline
