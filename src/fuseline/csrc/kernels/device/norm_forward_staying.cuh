// The norms' forward with blocks that stay: the same results as in norm_forward_rows.cuh, for x of y's dtype (sm_90).
//
// Moves: as there; limit: HBM bandwidth. Threads: a row belongs to a warp, a block or a cluster, each warp to a part of
// it, the same columns of row after row: so a thread keeps its weights. One lane sends for the warp's parts of several
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

__device__ __forceinline__ void commit_copies_out() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// A warp's part of a row: `count` vectors from number `first` on, of which the row's first has `head` elements before it.
template <class T>
struct Stretch {
  int first, count, head;

  __device__ __forceinline__ Stretch(int n, int into, int place, int most)
      : first(place * most),
        count(min(max((n + into + kVector<T> - 1) / kVector<T> - place * most, 0), most)),
        head(into) {}
  // The element that its vector number `slot` begins with.
  __device__ __forceinline__ int element(int slot) const { return (first + slot) * kVector<T> - head; }

  // Sends for it, and one barrier hears of it; one lane calls. The vectors at a row's ends bring elements of its
  // neighbours along, but where the tensor begins or ends nothing from outside of it.
  template <bool kAligned>
  __device__ __forceinline__ void fetch(const T* row, int n, bool opens, bool ends, uint4* slots,
                                        uint64_t* arrived) const {
    int from = 0, to = count;
    if constexpr (!kAligned) {
      if (opens && count > 0 && element(0) < 0) slots[from++] = load_vector<T, false>(row, element(0), n, false);
      if (ends && to > from && element(to) > n) --to, slots[to] = load_vector<T, false>(row, element(to), n, false);
    }
    const int bytes = (to - from) * 16;
    barrier_expect(arrived, bytes);
    if (bytes > 0) copy_in(slots + from, row + element(from), bytes, arrived);
  }

  // Sends what all lanes have put into its slots, as one group of copies each time.
  template <bool kAligned>
  __device__ __forceinline__ void send(T* row, int n, const uint4* slots) const {
    show_to_copies();
    __syncwarp();
    if (threadIdx.x % kWarp > 0) return;
    int from = 0, to = count;
    if constexpr (!kAligned) {
      if (to > 0 && element(0) < 0) ++from;
      if (to > from && element(to) > n) --to;
    }
    if (to > from) {
      copy_out(row + element(from), slots + from, (to - from) * 16);
    } else {
      commit_copies_out();
    }
  }
};

// What was sent before the last group has been read.
__device__ __forceinline__ void wait_for_earlier_copies_out() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
#endif
}

// kAligned: rows keep to 16-byte steps. kOneWarp: each has one warp, otherwise a block or a cluster.
template <class T, bool kAligned, bool kOneWarp>
__global__ void __launch_bounds__(kMostThreads, 1) norm_forward_staying(const StayingNorm given) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ StayingBarriers barriers;
  constexpr int kSize = kVector<T>, kHeld = kStayingHeld;
  const NormForward& a = given.norm;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const int blocks = kOneWarp ? 1 : a.cluster, rank = int(blockIdx.x) & (blocks - 1);
  const int place = kOneWarp ? 0 : rank * warps + warp, n = int(a.n), stages = given.stages;
  const int apart = kOneWarp ? int(gridDim.x) * warps : int(gridDim.x / unsigned(blocks));
  const int64_t first = kOneWarp ? int64_t(blockIdx.x) * warps + warp : int64_t(blockIdx.x / unsigned(blocks));
  const int turns = first < a.rows ? int((a.rows - 1 - first) / apart) + 1 : 0;
  const int count = blocks * warps;  // of warps that share a row
  uint4* const mine = ring + warp * stages * given.part;
  Moments* const states = reinterpret_cast<Moments*>(ring + warps * stages * given.part);
  uint64_t* const arrived = barriers.arrived[warp];

  let_next_start();
  if (lane < stages) barrier_init(&arrived[lane], 1);
  if (!kOneWarp && threadIdx.x < kMeetings) barrier_init(&barriers.met[threadIdx.x], blocks == 1 ? warps : 1);
  publish_barriers();
  if (kOneWarp) {
    __syncwarp();
  } else if (blocks == 1) {
    __syncthreads();
  } else {
    cluster_arrive_relaxed();
    __syncwarp();
  }
  // The offset of a row, and this warp's part of it; y stands in its vectors as x does.
  const auto offset = [&](int turn) { return (first + int64_t(turn) * apart) * a.n; };
  const Stretch<T> every(n, 0, place, given.part);
  const auto stretch_of = [&](int turn) {
    if constexpr (kAligned) {
      return every;
    } else {
      return Stretch<T>(n, elements_into_vector(static_cast<const T*>(a.x) + offset(turn)), place, given.part);
    }
  };
  wait_for_earlier();
  const auto fetch = [&](int turn, int stage) {
    const int64_t row = first + int64_t(turn) * apart;
    stretch_of(turn).template fetch<kAligned>(static_cast<const T*>(a.x) + row * a.n, n, row == 0, row == a.rows - 1,
                                              mine + stage * given.part, &arrived[stage]);
  };
  if (lane == 0) {
    for (int turn = 0; turn < min(stages, turns); ++turn) fetch(turn, turn);
  }
  // The weights of this thread's columns, where it can keep them.
  const bool keeps = kAligned && (sizeof(T) == 4 || !a.fp32_weights);
  uint4 weight[kHeld], bias[kHeld];
  const int begin = place * given.part * kSize;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int slot = k * kWarp + lane, column = begin + slot * kSize;
    weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
    if (keeps && slot < given.part && column < n) {
      if (a.weight) weight[k] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.weight) + column));
      if (a.bias) bias[k] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.bias) + column));
    }
  }
  if (blocks > 1) cluster_wait();  // the others' barriers are there

  const float inverse_n = 1.f / float(a.n);
  const auto warp_sum = [](auto value) { return sum_over_warp(value); };
  // The moments of this warp's part.
  const auto take = [&](int turn, int stage, int phase) {
    const Stretch<T> part = stretch_of(turn);
    const uint4* const slots = mine + stage * given.part;
    int elements = part.count * kSize;
    if constexpr (!kAligned) elements = max(min(part.element(part.count), n) - max(part.element(0), 0), 0);
    const float inverse = kOneWarp ? inverse_n : 1.f / float(max(elements, 1));
    barrier_wait(&arrived[stage], phase);
    float values[kHeld][kSize];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = k * kWarp + lane;
      uint4 raw = slot < part.count ? slots[slot] : make_uint4(0, 0, 0, 0);
      if constexpr (!kAligned) {
        const int from = part.element(slot);
        if (from < 0 || from + kSize > n) blank<T>(raw, from, n, 0u);
      }
      unpack<T>(raw, values[k]);
    }
    return moments_of<T>(
        values, float(elements), inverse, a.centred,
        [&](int k) {
          const int slot = k * kWarp + lane;
          return slot < part.count && (kAligned || (part.element(slot) >= 0 && part.element(slot + 1) <= n));
        },
        [&](int k, int i) {
          const int slot = k * kWarp + lane, at = part.element(slot) + i;
          return !kAligned && slot < part.count && at >= 0 && at < n;
        },
        warp_sum);
  };
  // Puts y in the row's place and sends it.
  const auto give = [&](int turn, int stage, const Moments& row) {
    const float rstd = rstd_of<T>(row.squares, inverse_n, a.eps);
    if (place == 0 && lane == 0) keep_statistics(a, first + int64_t(turn) * apart, row.mean, rstd);
    const Stretch<T> part = stretch_of(turn);
    uint4* const slots = mine + stage * given.part;
    T* const y = static_cast<T*>(a.y) + offset(turn);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = k * kWarp + lane, column = part.element(slot);
      if (slot >= part.count) continue;
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
        normalize<T, kAligned>(a, column, n, row.mean, rstd, values);
      }
      if constexpr (kAligned) {
        slots[slot] = pack<T>(values);
      } else {
        if (column >= 0 && column + kSize <= n) {
          slots[slot] = pack<T>(values);
        } else {
          store_vector<T, false>(y, column, n, true, values);
        }
      }
    }
    part.template send<kAligned>(y, n, slots);
  };
  // Into the place of a row that has been sent before the last one.
  const auto refill = [&](int turn, int stage) {
    if (lane > 0 || turn >= turns) return;
    wait_for_earlier_copies_out();
    fetch(turn, stage);
  };
  const auto before = [&](int stage) { return stage == 0 ? stages - 1 : stage - 1; };

  int stage = 0, phase = 0;
  if constexpr (kOneWarp) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      give(turn, stage, take(turn, stage, phase));
      if (turn > 0) refill(turn - 1 + stages, before(stage));
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  } else {
#pragma unroll 1
    for (int turn = 0; turn <= turns; ++turn) {
      if (turn < turns) {
        const Moments moments = take(turn, stage, phase);
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
      }
      if (turn > 0) {
        const int set = (turn - 1) % kMeetings;
        barrier_wait(&barriers.met[set], (turn - 1) / kMeetings & 1);
        give(turn - 1, before(stage), combine(states + set * count, count, float(a.n), a.centred));
        if (turn > 1) refill(turn - 2 + stages, before(before(stage)));
      }
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  }
  if (lane == 0) wait_for_copies_out();
#endif
}

}  // namespace fuseline
