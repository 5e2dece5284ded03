// The norms' backward for long rows (sm_90): rows run ahead of the arithmetic through a ring in shared memory.
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth, for which a multiprocessor needs some 64 KB on their way; what
// registers the sums of columns leave cannot hold them, shared memory can.
//
// Threads: one block a multiprocessor, which stays. The blocks of a cluster share a row, or the groups of a block have rows
// of their own. Each warp has neighbouring columns and a ring of its own: one of its lanes sends for its part of a row in
// bulk copies and, once the warp is through with a row, for that which takes its place; no warp waits for another but
// where rows meet. They meet one row behind (meeting.cuh): the sums of a row travel while the next one is read. Rows at any
// address come with the vectors that they stand in and are shifted into place when read (shifted.cuh), so that a thread
// always has the same columns.
#pragma once

#include "meeting.cuh"
#include "norm_backward_ring_parts.cuh"

namespace fuseline {

constexpr int kMostRingStages = 6;
constexpr int kMostRingGroups = 16;
constexpr int kLine = 128;  // bytes

template <class XType, class YType, int kSlotsOfThread, int kSumsOfColumn, bool kCentredRows, bool kShiftedRows,
          bool kPastRing = false, bool kLinedRows = false>
struct RingKind {
  using X = XType;
  using Y = YType;
  static constexpr int kSlots = kSlotsOfThread, kSums = kSumsOfColumn;
  static constexpr bool kCentred = kCentredRows, kShifted = kShiftedRows, kAdded = kSumsOfColumn == kSumsOfAddedNorm;
  static constexpr bool kPast = kPastRing;  // grad_sum has no room in the ring,
  static constexpr bool kBeside = kPast && sizeof(X) == sizeof(Y);  // but for one row beside it; else it is loaded late
  // A part of a row has the place in a line of 128 bytes that it has in memory: else copies of rows that keep to no line
  // are slower, 0.895 in place of 0.962 of the copy bandwidth in sums of 1,000 elements of 16 bits.
  static constexpr bool kLined = kLinedRows;
  static constexpr bool kAhead = kLined && kAdded && kSlots == 2;  // a row's mask is there before the row
  static constexpr int kSize = kVector<Y>;
  static constexpr bool kWide = kAdded || sizeof(X) > sizeof(Y);
  static constexpr bool kMore = kWide || kShifted;  // registers
  static constexpr int kThreads = kSlots > 2 ? (kMore ? 384 : 512) : kMore ? 512 : 640;
  static constexpr int kColumns = kWarp * kSlots * kSize;  // of a warp
  // Bytes of a warp's part of a row: where rows are shifted, one vector more than its elements fill.
  template <class T>
  static constexpr int kPart = kColumns * int(sizeof(T)) + (kShifted ? 16 : kLined ? kLine : 0);
  static constexpr int kStage = kPart<X> * (kAdded ? 2 : 1) + kPart<Y>;
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
  constexpr bool kShifted = Kind::kShifted, kAdded = Kind::kAdded, kCentred = Kind::kCentred;
  constexpr int kStep = kWarp * kSize;  // between the slots of a thread
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kMostRingStages][Kind::kThreads / kWarp];
  __shared__ uint64_t met[kMeetings][kMostRingGroups];
  __shared__ uint64_t past_arrived[Kind::kBeside ? Kind::kThreads / kWarp : 1];

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
  const bool centred = kCentred && (!(kAdded || Kind::kPast) || a.mean);
  const bool wants_rows = Kind::kPast || a.wants_rows();
  const bool alone = !Kind::kPast && cluster * warps == 1;  // a row has one warp
  const int behind = stages > 2 && !alone ? 1 : 0;        // rows between the first pass and the second

  const int place = group * warps + warp;  // of this warp's ring
  const int stage_bytes = int(blockDim.y) * warps * Kind::kStage;
  unsigned char* const mine = ring + place * Kind::kStage;
  const auto stage_at = [&](int stage) { return mine + stage * stage_bytes; };
  constexpr int kGradY = Kind::template kPart<X>, kGradSum = kGradY + Kind::template kPart<Y>;  // behind x
  // Where in its line this warp's part of x begins; those of the other tensors mostly begin there, too.
  const auto line_of = [&](int64_t row) {
    if constexpr (!Kind::kLined) return 0;
    const uint32_t at = uint32_t(reinterpret_cast<uintptr_t>(a.x));
    return int((at + (uint32_t(row) * uint32_t(n) + uint32_t(from)) * uint32_t(sizeof(X))) % kLine);
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row >= rows) return;
    unsigned char* const to = stage_at(stage) + line_of(row);
    uint64_t* const barrier = &arrived[stage][place];
    const auto parts = [&](bool prepare) {
      int bytes = fetch_part<X, kColumns, kShifted>(a, a.x, row, from, to, barrier, prepare);
      bytes += fetch_part<Y, kColumns, kShifted>(a, a.grad_y, row, from, to + kGradY, barrier, prepare);
      if (kAdded && a.grad_sum) {
        bytes += fetch_part<X, kColumns, kShifted>(a, a.grad_sum, row, from, to + kGradSum, barrier, prepare);
      }
      return bytes;
    };
    barrier_expect(barrier, parts(true));
    parts(false);
    if (Kind::kPast && from < n) {
      prefetch(static_cast<const X*>(a.grad_sum) + row * a.n + from, min(kColumns, n - from) * int(sizeof(X)));
    }
  };

  // Behind the ring: states of meetings, weights, and for each warp a part of grad_sum.
  unsigned char* const behind_ring = ring + stages * stage_bytes;
  const int states_count = int(blockDim.y) * cluster * warps;
  unsigned char* const kept = behind_ring + kMeetings * states_count * int(sizeof(float2));
  const bool wide_weights = (a.weight && a.fp32_weights) || sizeof(Y) == 4;
  unsigned char* const behind_weights = kept + int(blockDim.x) * kSlots * kSize * (wide_weights ? 4 : 2);
  unsigned char* const past = behind_weights + warp * Kind::template kPart<X>;
  const auto fetch_past = [&](int64_t row) {
    if (row >= rows) return;
    barrier_expect(&past_arrived[warp], max(0, min(kColumns, n - from)) * int(sizeof(X)));
    fetch_part<X, kColumns, false>(a, a.grad_sum, row, from, past, &past_arrived[warp], false);
  };

  let_next_start();
  // By loops of one thread: of a predicated `mbarrier.init` racecheck takes every thread's register for an address.
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) barrier_init(&arrived[stage][place], 1);
    if constexpr (Kind::kBeside) barrier_init(&past_arrived[warp], 1);
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
    if constexpr (Kind::kBeside) fetch_past(first_row);
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
  const auto statistics = [&](int64_t row, float& mean, float& rstd) {
    const bool there = row < rows;
    forget(row);  // that all lanes have it: a load known to be the same for all is waited for where it stands
    mean = centred && there ? a.mean[row] : 0.f;
    rstd = there ? a.rstd[row] : 0.f;
  };
  const auto head_of = [&](const auto* tensor, int64_t row) {
    return kShifted ? elements_into_vector(tensor + row * a.n) : 0;
  };
  int stage = 0, parity = 0, before = 0;
  int64_t row = first_row;
  float2 warp_sums = make_float2(0.f, 0.f);
  RowTerms terms;
  float mean, rstd;
  statistics(row, mean, rstd);
  [[maybe_unused]] uint32_t kept_now = 0, kept_before = 0;  // a bit for each element of the thread
#pragma unroll 1
  for (int turn = 0;; ++turn, row += groups) {
    const bool there = row < rows;
    float next_mean, next_rstd;
    statistics(row + groups, next_mean, next_rstd);
    if constexpr (Kind::kAhead) {
      if (there && a.dropout.seed) kept_now = kept_of_slots<kSize, kSlots>(a.dropout, seed, row * a.n + start, kStep);
    }
    if (there) {
      const unsigned char* const parts = stage_at(stage) + line_of(row);
      const int x_head = head_of(static_cast<const X*>(a.x), row);
      const int grad_head = head_of(static_cast<const Y*>(a.grad_y), row);
      barrier_wait(&arrived[stage][place], parity);
      float sum = 0.f, product_sum = 0.f;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const int first = start + k * kStep;
        if (!kShifted && first >= n) continue;
        float values[kSize], grad[kSize], weight[kSize];
        weights.take(k, weight);
        take_slot<X, kSize, kShifted>(parts, k * kWarp + lane).values(x_head, values);
        take_slot<Y, kSize, kShifted>(parts + kGradY, k * kWarp + lane).values(grad_head, grad);
        if constexpr (kShifted) {  // beyond the row stand others, or nothing
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (first + i >= n) values[i] = mean, grad[i] = 0.f;
          }
        }
        first_pass<kSize, kSums, kCentred>(values, grad, weight, mean, rstd, columns[k], sum, product_sum);
      }
      if (wants_rows) {
        warp_sums = sum_over_warp(make_float2(sum, product_sum));
        if (!alone) meeting.publish(turn, warp_sums, group, warp, lane);
      }
    }
    if (!behind) before = stage, terms.mean = mean, terms.rstd = rstd, kept_before = kept_now;
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
        const unsigned char* const parts = stage_at(before) + line_of(done);
        const int x_head = head_of(static_cast<const X*>(a.x), done);
        const int grad_head = head_of(static_cast<const Y*>(a.grad_y), done);
        int64_t base = done * a.n;
        forget(base);  // kept, rather than multiplied anew for each store
        if constexpr (Kind::kBeside) barrier_wait(&past_arrived[warp], (turn - behind) & 1);
#pragma unroll
        for (int k = 0; k < kSlots; ++k) {
          const int first = start + k * kStep;
          if (kShifted ? from + k * kStep >= n : first >= n) continue;  // shifted, all lanes of a warp store together
          float values[kSize], grad[kSize], weight[kSize];
          weights.take(k, weight);
          take_slot<X, kSize, kShifted>(parts, k * kWarp + lane).values(x_head, values);
          take_slot<Y, kSize, kShifted>(parts + kGradY, k * kWarp + lane).values(grad_head, grad);
          second_pass<kSize, kCentred>(values, weight, terms, grad);
          if constexpr (kAdded) {
            if (a.grad_sum) {
              take_slot<X, kSize, kShifted>(parts + kGradSum, k * kWarp + lane)
                  .values(head_of(static_cast<const X*>(a.grad_sum), done), values);
#pragma unroll
              for (int i = 0; i < kSize; ++i) grad[i] += values[i];
            }
            if (a.grad_x) store_slot<X, kSize, kShifted>(static_cast<X*>(a.grad_x) + base, first, n, kWarp, grad);
            if (a.dropout.seed) {
              float multipliers[kSize];
              if constexpr (Kind::kAhead) {
#pragma unroll
                for (int i = 0; i < kSize; ++i) {
                  multipliers[i] = kept_before >> (k * kSize + i) & 1 ? a.dropout.scale : 0.f;
                }
              } else {
                dropout_row<kSize, kShifted>(a.dropout, seed, base + first, multipliers);
              }
#pragma unroll
              for (int i = 0; i < kSize; ++i) grad[i] *= multipliers[i];
            }
            if (a.grad_dropped) {
              store_slot<Y, kSize, kShifted>(static_cast<Y*>(a.grad_dropped) + base, first, n, kWarp, grad);
            }
#pragma unroll
            for (int i = 0; i < kSize; ++i) columns[k].x_bias[i] += grad[i];
          } else {
            if constexpr (Kind::kPast) {
              HeldSlot<X, kSize, false> added;
              if (Kind::kBeside) added = take_slot<X, kSize, false>(past, k * kWarp + lane);
              if (!Kind::kBeside) added.load(static_cast<const X*>(a.grad_sum) + base, first, n, 0, 0);
              added.values(0, values);
#pragma unroll
              for (int i = 0; i < kSize; ++i) grad[i] += values[i];
            }
            store_slot<X, kSize, kShifted>(static_cast<X*>(a.grad_x) + base, first, n, kWarp, grad);
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        fetch(done + int64_t(stages) * groups, before);
        if constexpr (Kind::kBeside) fetch_past(done + groups);
      }
    }
    if (!there) break;
    before = stage, terms.mean = mean, terms.rstd = rstd, kept_before = kept_now;
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
