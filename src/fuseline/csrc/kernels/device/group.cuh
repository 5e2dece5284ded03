// The threads that share a row: a part of a warp, a warp, several warps, or the blocks of a cluster (sm_90), and
// how they agree on a sum, a maximum or a moment.
//
// A block is (threads of one row, rows). Below 32 threads a row they are a power of two and sit in one warp; above,
// a multiple of 32. Inside a warp values travel by shuffles, in a fixed tree. Across warps each warp publishes one
// small state in shared memory (in that of every block of the cluster), all meet at one barrier, and every warp
// combines the states for itself: one barrier a row, and the same bits each run.
#pragma once

#include <cstdint>

#include "../plans/device.h"

namespace fuseline {

constexpr unsigned kAllLanes = 0xffffffffu;

// Launch bounds of a kernel that holds `registers` registers of a row in each thread.
constexpr int most_threads(bool one_warp) { return one_warp ? kMostShortRowBlock : kMostThreads; }
constexpr int least_blocks(bool one_warp, int registers) {
  return !one_warp ? 2 : registers <= 8 ? 6 : registers <= 16 ? 5 : 4;
}

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Writes one word into the shared memory of block `rank` of the cluster, where this block has `here`.
__device__ __forceinline__ void store_in_cluster(void* here, int rank, uint32_t word) {
#if __CUDA_ARCH__ >= 900
  const uint32_t local = uint32_t(__cvta_generic_to_shared(here));
  asm volatile(
      "{\n .reg .u32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " st.shared::cluster.u32 [remote], %2;\n}\n" ::"r"(local),
      "r"(rank), "r"(word)
      : "memory");
#endif
}

// What rows sum: a value, or two at one meeting.
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }
__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// The value of the lane whose number differs by the bit `step`.
__device__ __forceinline__ float from_lane(float value, int step) { return __shfl_xor_sync(kAllLanes, value, step); }
__device__ __forceinline__ double from_lane(double value, int step) { return __shfl_xor_sync(kAllLanes, value, step); }
__device__ __forceinline__ float2 from_lane(float2 value, int step) {
  return make_float2(from_lane(value.x, step), from_lane(value.y, step));
}

// The largest value of a warp in one instruction: the bits of floats, those of negative ones turned round, are in order
// as integers. NaN may be passed over, as by fmaxf.
__device__ __forceinline__ float largest_of_warp(float value) {
#if __CUDA_ARCH__ >= 800
  int bits = __float_as_int(value);
  bits = __reduce_max_sync(kAllLanes, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
#else
  return value;
#endif
}

// The sum over `lanes` neighbouring lanes, a power of two.
template <class Value>
__device__ __forceinline__ Value sum_of_lanes(Value value, int lanes) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (step < lanes) value = plus(value, from_lane(value, step));
  }
  return value;
}

// Where this thread stands among those of its row, and what they meet through. With kOneWarp the row is known to have
// no more threads than a warp, and nothing of the rest is kept in registers. The whole block meets at once, so all its
// rows have to meet equally often: a barrier whose number is not a constant takes all 16 of a block, and a
// multiprocessor seems to have them for four blocks only.
template <class State, bool kOneWarp = false>
struct Group {
  int threads;   // of this block that share the row
  int lane;      // of these, 0 ..
  int width;     // lanes of this warp that share the row, a power of two
  int blocks;    // of the cluster that share the row
  int rank;      // this block among those
  int first;     // blocks, clusters counting once, before this one
  int states;    // warps that share the row, over all its blocks
  State* slots;  // two sets of `states` for this row's threads, so that one barrier a row is enough
  int turn;      // the set to publish in
  bool waiting;  // for the other blocks to begin

  // `shared` holds 2 * kMaxStates. Blocks of one cluster, a power of two, are neighbours in the grid.
  __device__ __forceinline__ Group(State* shared, int cluster)
      : threads(blockDim.x),
        lane(threadIdx.x),
        width(min(int(blockDim.x), kWarp)),
        blocks(cluster),
        rank(kOneWarp ? 0 : int(blockIdx.x) & (cluster - 1)),
        first(kOneWarp ? int(blockIdx.x) : int(blockIdx.x) >> ((cluster > 1) + (cluster > 2) + (cluster > 4))),
        states(cluster * (int(blockDim.x) / kWarp)),
        slots(shared + (blockDim.x > kWarp ? threadIdx.y * (blockDim.x / kWarp) : 0)),
        turn(0),
        waiting(cluster > 1) {
    // Nobody writes to a block that has not begun: publish() waits for this.
    if (!kOneWarp && blocks > 1) cluster_arrive();
  }

  __device__ __forceinline__ bool in_one_warp() const { return kOneWarp || states <= 1; }

  // Sums and maxima over the lanes of this warp that share the row.
  template <class Value>
  __device__ __forceinline__ Value warp_sum(Value value) const {
    return sum_of_lanes(value, width);
  }

  __device__ __forceinline__ float warp_max(float value) const {
    if (width == kWarp) return largest_of_warp(value);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      if (step < width) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    return value;
  }

  // Lanes for the states of the row's warps, a power of two: each state is with as many lanes as there is room for, and
  // what is left of the tree is short.
  __device__ __forceinline__ int lanes_of_states() const {
    return states > kWarp / 2 ? kWarp : 1 << (32 - __clz(states - 1));
  }

  // Before the end of a kernel that may not have published: its blocks still have to have begun together.
  __device__ __forceinline__ void leave() {
    if (waiting) cluster_wait();
    waiting = false;
  }

  // The states of all warps of the row, `states` of them. Every thread of the group calls, with its warp's state.
  // They stay valid until the call after the next.
  __device__ __forceinline__ const State* publish(const State& mine) {
    leave();
    State* const set = slots + turn * kMaxStates;
    turn ^= 1;
    State* const slot = set + rank * (threads / kWarp) + lane / kWarp;
    if (blocks == 1) {
      if (lane % kWarp == 0) *slot = mine;
      __syncthreads();
    } else {
      if (lane % kWarp < blocks) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&mine);
#pragma unroll
        for (int i = 0; i < int(sizeof(State) / 4); ++i) {
          store_in_cluster(reinterpret_cast<uint32_t*>(slot) + i, lane % kWarp, words[i]);
        }
      }
      cluster_arrive();
      cluster_wait();
    }
    return set;
  }
};

// The sum of a value over the row.
template <class Value, bool kOneWarp>
__device__ __forceinline__ Value sum_over_row(Value mine, Group<Value, kOneWarp>& group) {
  const Value warp = group.warp_sum(mine);
  if (group.in_one_warp()) return warp;
  const Value* states = group.publish(warp);
  const int lanes = group.lanes_of_states();
  Value total{};
#pragma unroll 1
  for (int i = group.lane & (lanes - 1); i < group.states; i += kWarp) total = plus(total, states[i]);
  return sum_of_lanes(total, lanes);
}

}  // namespace fuseline
