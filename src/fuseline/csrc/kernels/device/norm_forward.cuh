// The kernels of the norms' forward: y = (x - mean) * rstd * weight + bias over each row (mean 0 in an RMS norm), of x or
// of a sum that is made on the way and returned, too: sum = residual + dropout(x + x_bias), rounded to the rows' dtype.
//
// Moves: x (and residual) read once, y (and sum) written once; weight and bias come from cache. Does: about 12
// operations an element, and 15 more for a mask. Limit: HBM bandwidth.
//
// Threads: three kernels. Short rows: a row belongs to a part of a warp, a warp or a block and stays in registers,
// kHeld 16-byte vectors a thread, and the block ends with its row. Long rows: blocks stay, and the rows come through a
// ring in shared memory, several ahead (ring.cuh); the warps of a row, or the blocks of a cluster, meet one row behind
// (meeting.cuh). Rows longer than a cluster can hold are read twice.
#pragma once

#include "meeting.cuh"
#include "moments.cuh"
#include "norm.cuh"
#include "ring.cuh"

namespace fuseline {

// How many of the elements first .. first + kSize are in 0 .. n.
template <int kSize, class Index>
__device__ __forceinline__ int count_inside(Index first, Index n) {
  const Index below = first < 0 ? -first : 0;
  const Index above = first + kSize > n ? first + kSize - n : 0;
  const Index inside = kSize - below - above;
  return inside > 0 ? int(inside) : 0;
}

// Calls value(i) for the elements of a vector that are inside the row.
template <int kSize, class Index, class Value>
__device__ __forceinline__ void each_inside(Index first, Index n, Value&& value) {
  if (first >= 0 && first + kSize <= n) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) value(i);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= 0 && first + i < n) value(i);
    }
  }
}

// values = residual + dropout(values + x_bias), the elements first .. of row `row`, rounded to T.
template <class T, bool kAligned, class Index>
__device__ __forceinline__ void add_residual(const NormForward& a, int64_t row, Index first, Index n,
                                             const uint4& residual, float (&values)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
  if (a.x_bias && !(kAligned && first >= n)) {
    float bias[kSize] = {};
    load_weights<T, kAligned>(a.x_bias, a.fp32_weights, first, n, bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += bias[i];
  }
  if (a.dropout.seed) {
    float kept[kSize];
    dropout_row<kSize, !kAligned>(a.dropout, uint64_t(*a.dropout.seed), row * a.n + first, kept);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] *= kept[i];
  }
  float other[kSize];
  unpack<T>(residual, other);
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] += other[i];
  unpack<T>(pack<T>(values), values);
}

// values = (values - mean) * rstd * weight + bias, the elements first .. of the row.
template <class T, bool kAligned, class Index>
__device__ __forceinline__ void normalize(const NormForward& a, Index first, Index n, float mean, float rstd,
                                          float (&values)[kVector<T>]) {
  constexpr int kSize = kVector<T>;
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] = (values[i] - mean) * rstd;
  if (kAligned && first >= n) return;
  if (a.weight) {
    float weight[kSize] = {};
    load_weights<T, kAligned>(a.weight, a.fp32_weights, first, n, weight);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] *= weight[i];
  }
  if (a.bias) {
    float bias[kSize] = {};
    load_weights<T, kAligned>(a.bias, a.fp32_weights, first, n, bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += bias[i];
  }
}

__device__ __forceinline__ float rstd_of(const NormForward& a, const Moments& row) {
  return 1.f / sqrtf(row.squares / float(a.n) + a.eps);
}

__device__ __forceinline__ void keep_statistics(const NormForward& a, int64_t row, float mean, float rstd) {
  if (a.mean) a.mean[row] = mean;
  if (a.rstd) a.rstd[row] = rstd;
}

// ---- a block for each row, or for several short ones ----

// Elements of a row apart have addresses apart: a sum of such rows takes the registers it needs.
constexpr int forward_blocks(bool added, bool aligned, bool one_warp, int values) {
  return added && !aligned ? 1 : least_blocks(one_warp, added ? 2 * values : values);
}

template <class T, bool kAdded, int kHeld, bool kAligned, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), forward_blocks(kAdded, kAligned, kOneWarp, kHeld * kVector<T>))
    norm_forward_rows(const NormForward a) {
  __shared__ Moments shared[2 * kMaxStates];
  Group<Moments, kOneWarp> group(shared, 1);
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
  int64_t row = int64_t(group.first) * blockDim.y + threadIdx.y;
  const int inside = row < a.rows ? n : 0;
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  const int head = kAligned ? 0 : elements_into_vector(x);
  int start = group.lane * kSize - head;
  float values[kHeld][kSize];
  {
    const T* residual = static_cast<const T*>(a.residual) + row * a.n;
    const bool residual_vectors = kAdded && !kAligned && elements_into_vector(residual) == head;
    uint4 raw[kHeld], other[kAdded ? kHeld : 1];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      raw[k] = load_vector<T, kAligned>(x, start + k * step, inside, true);
      if constexpr (kAdded) other[k] = load_vector<T, kAligned>(residual, start + k * step, inside, residual_vectors);
    }
    T* sum = static_cast<T*>(a.sum) + row * a.n;
    const bool sum_vectors = kAdded && !kAligned && elements_into_vector(sum) == head;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      unpack<T>(raw[k], values[k]);  // zeros outside the row
      if constexpr (kAdded) {
        add_residual<T, kAligned>(a, row, start + k * step, inside, other[k], values[k]);
        store_vector<T, kAligned>(sum, start + k * step, inside, sum_vectors, values[k]);
      }
    }
  }
  float count = float(n), mean = 0.f;
  if (!group.in_one_warp()) {
    float held = 0.f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) held += float(count_inside<kSize>(start + k * step, inside));
    count = group.warp_sum(held);
  }
  if (a.centred) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if constexpr (kAdded) {  // outside the row stands what bias and mask left there
        each_inside<kSize>(start + k * step, inside, [&](int i) { sum += values[k][i]; });
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum += values[k][i];
      }
    }
    mean = count > 0.f ? group.warp_sum(sum) / count : 0.f;
  }
  float distances = 0.f, squares = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    each_inside<kSize>(start + k * step, inside, [&](int i) {
      const float apart = values[k][i] - mean;
      distances += apart;
      squares += apart * apart;
    });
  }
  squares = group.warp_sum(squares);
  const Moments warp = a.centred ? corrected(mean, group.warp_sum(distances), squares, count)
                                 : Moments{0.f, squares, count, 0.f};
  const Moments whole =
      group.in_one_warp() ? warp : combine(group.publish(warp), group.states, float(n), a.centred);
  const float rstd = rstd_of(a, whole);
  if (row >= a.rows) return;
  forget(start);
  forget(row);
  if (group.lane == 0) keep_statistics(a, row, whole.mean, rstd);
  T* y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    normalize<T, kAligned>(a, start + k * step, n, whole.mean, rstd, values[k]);
    store_vector<T, kAligned>(y, start + k * step, n, a.y_vectors, values[k]);
  }
}

// ---- blocks that stay ----

constexpr int kRingBlock = 1024;

// Vectors of each tensor that a thread has of a row.
template <bool kAdded>
constexpr int kRingHeld = kAdded ? 2 : 4;

// Bytes of the rows that a block has at a time.
template <bool kAdded>
constexpr int kRingStage = (kAdded ? 2 : 1) * kRingHeld<kAdded> * kRingBlock * 16;

using RingRoom = MeetingRoom<Moments, kRingBlock / kWarp, kRingBlock / kWarp * kMaxCluster>;

template <class T, bool kAdded>
__global__ void __launch_bounds__(kRingBlock, 1) norm_forward_ring(const NormForward a) {
  constexpr int kHeld = kRingHeld<kAdded>, kTensors = kAdded ? 2 : 1;
  constexpr int kSize = kVector<T>, kStep = kWarp * kSize;
  constexpr int kStageStep = kTensors * kHeld * kRingBlock;
  extern __shared__ uint4 ring[];
  __shared__ RingRoom room;

  const int n = int(a.n), threads = blockDim.x, cluster = a.cluster;
  const int shift = (cluster > 1) + (cluster > 2) + (cluster > 4);  // a power of two
  const int rank = int(blockIdx.x) & (cluster - 1);
  const int groups = int(gridDim.x) >> shift, group = int(blockIdx.x) >> shift;
  const int lane = int(threadIdx.x) % kWarp;
  // This warp's columns: kHeld vectors of each lane, side by side for the warp, from `begin` on.
  int begin = (rank * threads + int(threadIdx.x) - lane) * kHeld * kSize;
  uint4* const slots = ring + int(threadIdx.y) * threads + int(threadIdx.x);
  // All rows of a block take the same number of turns. Nothing of 64 bits is kept from one to the next.
  const auto row_at = [&](int turn) {
    int64_t place = int64_t(group) + int64_t(turn) * groups;
    forget(place);
    return place * blockDim.y + threadIdx.y;
  };
  const auto is_turn = [&](int turn) { return row_at(turn) - threadIdx.y < a.rows; };

  const auto fetch_row = [&](int64_t row, int stage) {
    uint4* const to = slots + stage * kStageStep;
    forget(begin);
    const int64_t from = row * a.n + begin + lane * kSize;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const bool wanted = row < a.rows && begin + lane * kSize + k * kStep < n;
      copy_async<16>(to + k * kRingBlock, static_cast<const T*>(a.x) + from + k * kStep, wanted);
      if constexpr (kAdded) {
        const T* residual = static_cast<const T*>(a.residual) + from + k * kStep;
        copy_async<16>(to + (kHeld + k) * kRingBlock, residual, wanted);
      }
    }
    commit_copies();
  };
  const auto warp_sum = [](float value) {
#pragma unroll
    for (int by = kWarp / 2; by > 0; by /= 2) value += from_lane(value, by);
    return value;
  };
  // The moments of this warp's part of the row. A sum takes the place of x in the ring.
  const auto first_pass = [&](uint4* slot, int64_t row) {
    float values[kHeld][kSize];
    forget(begin);
    const int first = begin + lane * kSize, inside = row < a.rows ? n : 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      unpack<T>(slot[k * kRingBlock], values[k]);  // zeros outside the row
      if constexpr (kAdded) {
        add_residual<T, true>(a, row, first + k * kStep, inside, slot[(kHeld + k) * kRingBlock], values[k]);
        slot[k * kRingBlock] = pack<T>(values[k]);
        store_vector<T, true>(static_cast<T*>(a.sum) + row * a.n, first + k * kStep, inside, true, values[k]);
      }
    }
    const int left = n - begin;
    const float count = float(left < 0 ? 0 : left < kHeld * kStep ? left : kHeld * kStep);
    float mean = 0.f;
    if (a.centred) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (kAdded && first + k * kStep >= n) break;
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum += values[k][i];
      }
      mean = count > 0.f ? warp_sum(sum) / count : 0.f;
    }
    float distances = 0.f, squares = 0.f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (first + k * kStep >= n) break;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float apart = values[k][i] - mean;
        distances += apart;
        squares += apart * apart;
      }
    }
    squares = warp_sum(squares);
    return a.centred ? corrected(mean, warp_sum(distances), squares, count) : Moments{0.f, squares, count, 0.f};
  };
  const auto second_pass = [&](const uint4* slot, int64_t row, float mean, float rstd) {
    forget(begin);
    const int first = begin + lane * kSize;
    T* const y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll 2
    for (int k = 0; k < kHeld; ++k) {
      if (begin + k * kStep >= n) break;
      float values[kSize];
      unpack<T>(slot[k * kRingBlock], values);
      normalize<T, true>(a, first + k * kStep, n, mean, rstd, values);
      store_vector<T, true>(y, first + k * kStep, n, true, values);
    }
  };

  const int ahead = a.stages - 1;
  for (int turn = 0; turn < ahead; ++turn) fetch_row(row_at(turn), turn);
  Meeting<RingRoom, Moments> meeting{room, cluster, rank};
  meeting.open();
  int stage = 0;
  for (int turn = 0;; ++turn) {
    const int stage_before = stage > 0 ? stage - 1 : ahead;
    const bool more = is_turn(turn);
    if (more) {
      wait_for_oldest(ahead);
      meeting.publish(turn, first_pass(slots + stage * kStageStep, row_at(turn)));
    }
    if (turn > 0) {
      const Moments whole = combine(meeting.await(turn - 1), meeting.count(), float(n), a.centred);
      const float rstd = rstd_of(a, whole);
      const int64_t row = row_at(turn - 1);
      if (row < a.rows) {
        if (threadIdx.x == 0 && rank == 0) keep_statistics(a, row, whole.mean, rstd);
        second_pass(slots + stage_before * kStageStep, row, whole.mean, rstd);
      }
    }
    if (!more) break;
    fetch_row(row_at(turn + ahead), stage_before);
    stage = stage < ahead ? stage + 1 : 0;
  }
  wait_for_all();
}

// ---- rows that are too long ----

constexpr int kPiece = 4;  // vectors a thread has in flight

template <class T, bool kAdded>
__global__ void __launch_bounds__(512) norm_forward_streamed(const NormForward a) {
  __shared__ Moments shared[2 * kMaxStates];
  Group<Moments> group(shared, a.cluster);
  constexpr int kSize = kVector<T>;
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const T* x = static_cast<const T*>(a.x) + row * a.n;
  const T* residual = static_cast<const T*>(a.residual) + row * a.n;
  T* sum = static_cast<T*>(a.sum) + row * a.n;
  T* y = static_cast<T*>(a.y) + row * a.n;
  const int head = elements_into_vector(x);
  const bool residual_vectors = kAdded && elements_into_vector(residual) == head;
  const bool sum_vectors = kAdded && elements_into_vector(sum) == head;
  const int64_t vectors = (a.n + head + kSize - 1) / kSize;
  const int64_t share = (vectors + group.blocks - 1) / group.blocks;
  const int64_t begin = (share * group.rank + group.lane) * kSize - head;
  const int64_t share_end = share * (group.rank + 1) * kSize - head;
  const int64_t end = share_end < a.n ? share_end : a.n;
  Moments mine{0.f, 0.f, 0.f, 0.f};
  for (int64_t from = begin; from < end; from += kPiece * step) {
    float values[kPiece][kSize];
    uint4 raw[kPiece];
    float total = 0.f, count = 0.f;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k] = load_vector<T, false>(x, from + k * step, end, true);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int64_t first = from + k * step;
      unpack<T>(raw[k], values[k]);
      if constexpr (kAdded) {
        if (first < end) {
          const uint4 other = load_vector<T, false>(residual, first, end, residual_vectors);
          add_residual<T, false>(a, row, first, end, other, values[k]);
          store_vector<T, false>(sum, first, end, sum_vectors, values[k]);
        }
      }
      each_inside<kSize>(first, end, [&](int i) { total += values[k][i]; });
      count += float(count_inside<kSize>(first, end));
    }
    const float mean = a.centred ? total / count : 0.f;
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      each_inside<kSize>(from + k * step, end, [&](int i) {
        const float apart = values[k][i] - mean;
        squares += apart * apart;
      });
    }
    const float apart = mean - mine.mean;
    const float together = mine.count + count;
    mine.squares += squares + apart * apart * (mine.count * count / together);
    mine.mean += apart * (count / together);
    mine.count = together;
  }
  const float count = group.warp_sum(mine.count);
  const float mean = count > 0.f ? group.warp_sum(mine.count * mine.mean) / count : 0.f;
  const float apart = mine.mean - mean;
  const float distances = group.warp_sum(mine.count * apart);
  const float squares = group.warp_sum(mine.squares + mine.count * apart * apart);
  const Moments warp = a.centred ? corrected(mean, distances, squares, count) : Moments{0.f, squares, count, 0.f};
  const Moments whole = combine(group.publish(warp), group.states, float(a.n), a.centred);
  const float rstd = rstd_of(a, whole);
  if (group.lane == 0 && group.rank == 0) keep_statistics(a, row, whole.mean, rstd);
  // A thread reads again what it read, or wrote, before.
  const T* again = kAdded ? sum : x;
  const bool again_vectors = !kAdded || sum_vectors;
  for (int64_t from = begin; from < end; from += step) {
    float values[kSize];
    unpack<T>(load_vector<T, false>(again, from, end, again_vectors), values);
    normalize<T, false>(a, from, end, whole.mean, rstd, values);
    store_vector<T, false>(y, from, end, a.y_vectors, values);
  }
}

}  // namespace fuseline
