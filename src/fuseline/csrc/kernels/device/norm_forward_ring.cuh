// The norms' forward for long rows of one dtype at multiples of 16 bytes: the same results as in norm_forward_rows.cuh.
//
// Moves: as there; limit: HBM bandwidth, and that of the L2: rows whose weights came from there each time, two values for
// each of theirs, read 0.59 of the copy bandwidth at 65,536 elements. Threads: blocks stay, so that the weights of their
// columns stay in their L1. The rows come through a ring in shared memory, several ahead (ring.cuh); the warps of a row,
// or the blocks of a cluster, meet one row behind (meeting.cuh).
#pragma once

#include "meeting.cuh"
#include "norm_elements.cuh"
#include "ring.cuh"

namespace fuseline {

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
        float residual[kSize];
        unpack<T>(slot[(kHeld + k) * kRingBlock], residual);
        add_residual<T, true>(a, row, first + k * kStep, inside, residual, values[k]);
        slot[k * kRingBlock] = pack<T>(values[k]);
        unpack<T>(slot[k * kRingBlock], values[k]);  // rounded
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

}  // namespace fuseline
