// The norms' backward for rows that the threads of one block hold in registers.
//
// Moves: x, grad_y (and grad_sum) read once, grad_x (and grad_dropped) written once; besides, a few fp32 rows a block of
// partial sums. Does: about 20 operations an element, and 15 more for a mask. Limit: HBM bandwidth.
//
// Threads: the grid is as large as the device holds at once, one block a multiprocessor, and each group of threads walks
// over rows with the same columns, the sums over rows in its registers. A group takes several rows a turn: all their
// loads are in flight at once, and one meeting (several_sums.cuh) is for all their sums. Groups meet apart from each
// other, so while one waits for memory or for its warps, others work. At the end each block writes a row of partial sums
// of each kind, and a second kernel adds those up in a fixed order: no atomics, the same bits each run.
#pragma once

#include "norm_gradient.cuh"
#include "device/overlap.cuh"
#include "several_sums.cuh"
#include "slot.cuh"

namespace fuseline {

// Which kernel: dtypes (of what was normalized, and of y), slots a thread has of a row, rows it has a turn, and threads of a
// block that its registers leave room for.
template <class XType, class YType, int kSlotsOfThread, int kRowsOfTurn, int kThreadsOfBlock, int kSumsOfColumn,
          bool kCentredRows>
struct HeldKind {
  using X = XType;
  using Y = YType;
  static constexpr int kSlots = kSlotsOfThread, kRows = kRowsOfTurn, kBlock = kThreadsOfBlock, kSums = kSumsOfColumn;
  static constexpr bool kCentred = kCentredRows, kOneWarp = false;
  static constexpr bool kAdded = kSumsOfColumn == kSumsOfAddedNorm;
  // Weights stay in registers, or are read again for each pass where the sums of many columns need these.
  static constexpr bool kKeepsWeights = kSlotsOfThread == 1;
};

// Warps of the blocks that share a row, or of one block.
constexpr int kMaxStatesOfCluster = 256;

// A slot of a row as it comes from memory, once.
template <class T, int kSize>
struct HeldSlot : Slot<T, kSize> {
  // Elements first .. first + kSize of the row at `row`, which has `n` elements (0: it is not there).
  __device__ __forceinline__ void load(const T* row, int first, int n) {
#pragma unroll
    for (int v = 0; v < this->kVectors; ++v) {
      this->raw[v] = first < n ? load_once(row + first + v * kVector<T>) : make_uint4(0, 0, 0, 0);
    }
  }
};

// Writes elements first .. first + kSize of a row of n elements.
template <class T, int kSize>
__device__ __forceinline__ void store_slot(T* row, int first, int n, const float (&values)[kSize]) {
  store_slot<T, true>(row, first, n, false, values);
}

template <class Kind>
__global__ void __launch_bounds__(Kind::kBlock, 1) norm_backward_held(const NormBackward a) {
  using X = typename Kind::X;
  using Y = typename Kind::Y;
  constexpr int kSize = kVector<Y>, kSlots = Kind::kSlots, kRows = Kind::kRows, kSums = Kind::kSums;
  constexpr bool kAdded = Kind::kAdded, kCentred = Kind::kCentred;
  constexpr int kValues = 2 * kRows;
  extern __shared__ __align__(16) float parts[];
  __shared__ float states[2][kMaxStatesOfCluster][kValues];
  __shared__ uint64_t barriers[2];

  let_next_start();
  wait_for_earlier();
  const int threads = blockDim.x, n = int(a.n);
  const int cluster = a.cluster;  // of blocks that share a row, a power of two; then they have one group
  const int rank = int(blockIdx.x) & (cluster - 1);
  const int lane = int(threadIdx.x) % kWarp, warps = threads / kWarp;
  const int block = int(blockIdx.x) / cluster;  // a cluster counts once
  const int step = threads * kSize;  // between the slots of a thread

  int start = rank * kSlots * step + int(threadIdx.x) * kSize;
  const bool centred = kCentred && (!kAdded || a.mean);
  const uint64_t seed = kAdded && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  const bool wants_rows = a.wants_rows();

  float kept[Kind::kKeepsWeights ? kSlots : 1][kSize];
  ColumnSums<kSize, kSums> columns[kSlots] = {};
  if constexpr (Kind::kKeepsWeights) {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) weights_of_columns<Y, false>(a, start + k * step, kept[k]);
  }
  const auto weights = [&](int k, float (&weight)[kSize]) {
    if constexpr (Kind::kKeepsWeights) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) weight[i] = kept[k][i];
    } else {
      forget(start);
      weights_of_columns<Y, false>(a, start + k * step, weight);
    }
  };

  if (cluster > 1) {
    if (threadIdx.x < 2) barrier_init(&barriers[threadIdx.x], 1);
    publish_barriers();
    cluster_arrive();
    cluster_wait();
  }
  int turn = 0;  // of meetings: each other one has the other set of states
  const int rows_of_block = int(blockDim.y) * kRows;  // at a turn
  const int64_t first_of_block = int64_t(block) * rows_of_block;
#pragma unroll 1
  for (int64_t first_row = first_of_block + int64_t(threadIdx.y) * kRows; first_row < a.rows;
       first_row += int64_t(gridDim.x) / cluster * rows_of_block) {
    HeldSlot<X, kSize> x[kRows][kSlots], grad_sum[kAdded ? kRows : 1][kSlots];
    HeldSlot<Y, kSize> grad_y[kRows][kSlots];
    RowTerms terms[kRows];
    // Everything is counted from the first row on, in 32 bits.
    int64_t base = first_row * a.n;
    int left = int(min(a.rows - first_row, int64_t(kRows)));
    const auto is_there = [&](int r) { return r < left; };
    const auto offset = [&](int r) { return r * n; };
    const X* const all_x = static_cast<const X*>(a.x);
    const X* const all_grad_sum = static_cast<const X*>(a.grad_sum);
    const Y* const all_grad_y = static_cast<const Y*>(a.grad_y);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool there = is_there(r);  // a row that is not there is zeros, and adds nothing
      const int64_t at = there ? base + offset(r) : 0;
      const int inside = there ? n : 0;
      terms[r].mean = there && centred ? a.mean[first_row + r] : 0.f;
      terms[r].rstd = there ? a.rstd[first_row + r] : 0.f;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const int first = start + k * step;
        x[r][k].load(all_x + at, first, inside);
        grad_y[r][k].load(all_grad_y + at, first, inside);
        if constexpr (kAdded) {
          if (a.grad_sum) grad_sum[r][k].load(all_grad_sum + at, first, inside);
        }
      }
    }
    float sums[kValues] = {};
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      float weight[kSize];
      weights(k, weight);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float values[kSize], grad[kSize];
        x[r][k].values(values);
        grad_y[r][k].values(grad);
        first_pass<kSize, kSums, kCentred>(values, grad, weight, terms[r].mean, terms[r].rstd, columns[k], sums[2 * r],
                                           sums[2 * r + 1]);
      }
    }
    if (!wants_rows) continue;
    forget(base);
    forget(left);
    forget(start);
    const int at = int(threadIdx.y) * warps, warp = int(threadIdx.x) / kWarp, set = turn % 2;
    if (cluster == 1) {
      leave_sums(sums, states[set][at + warp], lane);
      barrier_of(int(threadIdx.y) + 1, threads);
      take_sums(states[set][at], warps, lane, sums);
    } else {
      const int count = cluster * warps;
      if (threadIdx.x == 0) barrier_expect(&barriers[set], count * kValues * int(sizeof(float)));
      send_sums(sums, states[set][rank * warps + warp], &barriers[set], cluster, lane);
      barrier_wait(&barriers[set], turn / 2 % 2);
      take_sums(states[set][0], count, lane, sums);
    }
    ++turn;
#pragma unroll
    for (int r = 0; r < kRows; ++r) terms[r].set(a, centred, sums[2 * r], sums[2 * r + 1]);
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      float weight[kSize];
      weights(k, weight);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int first = start + k * step, inside = is_there(r) ? n : 0;
        float values[kSize], grad[kSize];
        x[r][k].forget_values();
        grad_y[r][k].forget_values();
        x[r][k].values(values);
        grad_y[r][k].values(grad);
        second_pass<kSize, kCentred>(values, weight, terms[r], grad);
        if constexpr (kAdded) {
          if (a.grad_sum) {
            grad_sum[r][k].values(values);
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] += values[i];
          }
          if (a.grad_x) {
            store_slot<X, kSize>(static_cast<X*>(a.grad_x) + base + offset(r), first, inside, grad);
          }
          if (a.dropout.seed) {
            float multipliers[kSize];
            dropout_multipliers(a.dropout, seed, base + offset(r) + first, multipliers);
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] *= multipliers[i];
          }
          if (a.grad_dropped) {
            Y* const row = static_cast<Y*>(a.grad_dropped) + base + offset(r);
            store_slot<Y, kSize>(row, first, inside, grad);
          }
#pragma unroll
          for (int i = 0; i < kSize; ++i) columns[k].x_bias[i] += grad[i];
        } else {
          store_slot<X, kSize>(static_cast<X*>(a.grad_x) + base + offset(r), first, inside, grad);
        }
      }
    }
  }
  if (a.partials) write_partials<Kind>(a, columns, parts, block);
}

}  // namespace fuseline
