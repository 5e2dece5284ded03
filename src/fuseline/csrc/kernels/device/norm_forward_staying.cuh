// The norms' forward with blocks that stay: the same results as in norm_forward_rows.cuh, for x of y's dtype (sm_90).
//
// Moves: as there; limit: HBM bandwidth. Threads: a row belongs to a block or a cluster, each warp to a part of it, the
// same columns of row after row: so a thread keeps its weights. One lane sends for the warp's parts of several
// rows ahead in bulk copies, and sends what has taken their place in bulk copies again. The warps of a row meet one row
// behind (meeting.cuh): they take their moments of the next row before they ask for those of the others.
#pragma once

#include "norm_row.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kStayingHeld = 4;  // vectors of a row that a thread has
constexpr int kMostAhead = 12;   // rows of a warp in shared memory

struct StayingNorm {
  NormForward norm;
  int part;    // vectors of a warp's part
  int stages;  // rows in shared memory
};

struct StayingBarriers {
  uint64_t arrived[kMostThreads / kWarp][kMostAhead];
  uint64_t met[kMeetings];
};

// What was sent before the last group has been read.
__device__ __forceinline__ void wait_for_earlier_copies_out() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
#endif
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1) norm_forward_staying(const StayingNorm given) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ StayingBarriers barriers;
  constexpr int kSize = kVector<T>, kHeld = kStayingHeld;
  const NormForward& a = given.norm;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const int blocks = a.cluster, rank = int(blockIdx.x) & (blocks - 1);
  const int place = rank * warps + warp, count = blocks * warps;  // among the warps that share a row
  const int n = int(a.n), stages = given.stages;
  const int apart = int(gridDim.x / unsigned(blocks));
  const int64_t first = int64_t(blockIdx.x / unsigned(blocks));
  const int turns = first < a.rows ? int((a.rows - 1 - first) / apart) + 1 : 0;
  const int begin = place * given.part * kSize;                             // element of the row
  const int own = min(max(n / kSize - place * given.part, 0), given.part);  // vectors from there on
  uint4* const mine = ring + warp * stages * given.part;
  Moments* const states = reinterpret_cast<Moments*>(ring + warps * stages * given.part);
  uint64_t* const arrived = barriers.arrived[warp];

  let_next_start();
  if (lane < stages) barrier_init(&arrived[lane], 1);
  if (threadIdx.x < kMeetings) barrier_init(&barriers.met[threadIdx.x], blocks == 1 ? warps : 1);
  publish_barriers();
  if (blocks == 1) {
    __syncthreads();
  } else {
    cluster_arrive_relaxed();
    __syncwarp();
  }
  wait_for_earlier();
  const auto offset = [&](int turn) { return (first + int64_t(turn) * apart) * a.n + begin; };
  const auto fetch = [&](int turn, int stage) {
    barrier_expect(&arrived[stage], own * 16);
    if (own > 0) {
      copy_in(mine + stage * given.part, static_cast<const T*>(a.x) + offset(turn), own * 16, &arrived[stage]);
    }
  };
  if (lane == 0) {
    for (int turn = 0; turn < min(stages, turns); ++turn) fetch(turn, turn);
  }
  // The weights of this thread's columns, if it can keep them.
  const bool keeps = sizeof(T) == 4 || !a.fp32_weights;
  uint4 weight[kHeld], bias[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int slot = k * kWarp + lane, column = begin + slot * kSize;
    weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
    if (!keeps || slot >= own) continue;
    if (a.weight) weight[k] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.weight) + column));
    if (a.bias) bias[k] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.bias) + column));
  }
  if (blocks > 1) cluster_wait();  // the others' barriers are there

  const float inverse_n = 1.f / float(n), elements = float(own * kSize), inverse = 1.f / float(max(own * kSize, 1));
  // Publishes the moments of this warp's part.
  const auto take = [&](int turn, int stage, int phase) {
    barrier_wait(&arrived[stage], phase);
    const uint4* const slots = mine + stage * given.part;
    float values[kHeld][kSize];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = k * kWarp + lane;
      unpack<T>(slot < own ? slots[slot] : make_uint4(0, 0, 0, 0), values[k]);
    }
    const Moments moments = moments_of<T>(
        values, elements, inverse, a.centred, [&](int k) { return k * kWarp + lane < own; },
        [](int, int) { return false; }, [](auto value) { return sum_over_warp(value); });
    const int set = turn % kMeetings;
    Moments* const state = states + set * count + place;
    if (blocks == 1) {
      if (lane == 0) {
        *state = moments;
        barrier_arrive(&barriers.met[set]);
      }
    } else {
      if (threadIdx.x == 0) barrier_expect(&barriers.met[set], count * int(sizeof(Moments)));
      if (lane < blocks) send_in_cluster(state, &barriers.met[set], lane, moments);
    }
  };
  // Puts y in the row's place and sends it.
  const auto give = [&](int turn, int stage) {
    const int set = turn % kMeetings;
    barrier_wait(&barriers.met[set], turn / kMeetings & 1);
    const Moments row = combine(states + set * count, count, float(n), a.centred);
    const float rstd = rstd_of<T>(row.squares, inverse_n, a.eps);
    if (place == 0 && lane == 0) keep_statistics(a, first + int64_t(turn) * apart, row.mean, rstd);
    uint4* const slots = mine + stage * given.part;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = k * kWarp + lane;
      if (slot >= own) continue;
      float values[kSize];
      unpack<T>(slots[slot], values);
      if (keeps) {
        if constexpr (std::is_same_v<T, __half>) forget(weight[k]), forget(bias[k]);  // 64 registers otherwise
        float weights[kSize], biases[kSize];
        unpack<T>(weight[k], weights);
        unpack<T>(bias[k], biases);
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = fmaf((values[i] - row.mean) * rstd, weights[i], biases[i]);
      } else {
        normalize<T, true>(a, begin + slot * kSize, n, row.mean, rstd, values);
      }
      slots[slot] = pack<T>(values);
    }
    show_to_copies();
    __syncwarp();
    if (lane == 0 && own > 0) copy_out(static_cast<T*>(a.y) + offset(turn), slots, own * 16);
  };
  const auto before = [&](int stage) { return stage == 0 ? stages - 1 : stage - 1; };

  int stage = 0, phase = 0;
#pragma unroll 1
  for (int turn = 0; turn <= turns; ++turn) {
    if (turn < turns) take(turn, stage, phase);
    if (turn > 0) give(turn - 1, before(stage));
    const int next = turn - 2 + stages;  // in the place of the row before that
    if (turn > 1 && next < turns && lane == 0) {
      wait_for_earlier_copies_out();
      fetch(next, before(before(stage)));
    }
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  if (lane == 0) wait_for_copies_out();
#endif
}

}  // namespace fuseline
