// How threads agree on several sums at once: those of a few rows, at one meeting.
//
// A warp that adds up V values over its lanes one by one takes 5 V shuffles. Here each step halves the values that a lane
// has to do with: V - 1 shuffles until each lane has one value, and one for each step that is left.
#pragma once

#include "device/meeting.cuh"

namespace fuseline {

// The sum over the warp's lanes of value number lane * kCount / kWarp; the values are used up.
template <int kCount>
__device__ __forceinline__ float sum_one_of(float (&values)[kCount], int lane) {
  static_assert(kCount >= 1 && kCount <= kWarp && (kCount & (kCount - 1)) == 0);
  int step = kWarp / 2;
#pragma unroll
  for (int half = kCount / 2; half >= 1; half /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? values[i] : values[i + half];
      values[i] = (upper ? values[i + half] : values[i]) + from_lane(sent, step);
    }
    step /= 2;
  }
  float sum = values[0];
#pragma unroll
  for (; step >= 1; step /= 2) sum += from_lane(sum, step);
  return sum;
}

// Sums over `width` lanes side by side, a power of two; every lane has them all.
template <int kCount>
__device__ __forceinline__ void sum_in_warp(float (&values)[kCount], int width) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (step >= width) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += from_lane(values[i], step);
  }
}

// The first half of a meeting of several warps: this warp's sums into its row of `states`, which a barrier has to follow.
template <int kCount>
__device__ __forceinline__ void leave_sums(float (&values)[kCount], float* state, int lane) {
  const float mine = sum_one_of(values, lane);
  if (lane % (kWarp / kCount) == 0) state[lane * kCount / kWarp] = mine;
}

// The second half: the sums over the `count` warps whose rows stand from `states` on, one after the other.
template <int kCount>
__device__ __forceinline__ void take_sums(const float* states, int count, int lane, float (&values)[kCount]) {
  float sum = 0.f;
#pragma unroll 1
  for (int i = lane / kCount; i < count; i += kWarp / kCount) sum += states[i * kCount + lane % kCount];
#pragma unroll
  for (int step = kCount; step < kWarp; step *= 2) sum += from_lane(sum, step);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = __shfl_sync(kAllLanes, sum, i);
}

// The same in a cluster: every warp's sums into that row of the states of each block, which each of them waits for with
// its own `barrier`.
template <int kCount>
__device__ __forceinline__ void send_sums(float (&values)[kCount], float* state, uint64_t* barrier, int blocks,
                                          int lane) {
  [[maybe_unused]] constexpr int kSame = kWarp / kCount;  // lanes that have the same sum, each for some blocks
  const float mine = sum_one_of(values, lane);
#if __CUDA_ARCH__ >= 900
  for (int rank = lane % kSame; rank < blocks; rank += kSame) {
    uint32_t to, at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(to)
                 : "r"(shared_address(state + lane * kCount / kWarp)), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(mine)), "r"(at)
                 : "memory");
  }
#endif
}

// A barrier of `threads` threads, `which` of 1 .. 15. A number that is no constant takes all 16 barriers of a block, and
// a multiprocessor has them for few blocks: for blocks that have one to themselves.
__device__ __forceinline__ void barrier_of(int which, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

}  // namespace fuseline
