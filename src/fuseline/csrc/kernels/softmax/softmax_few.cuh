// How the threads of few rows of softmax meet.
#pragma once

#include "plans/softmax.h"
#include "device/few_rows.cuh"
#include "device/launch.cuh"
#include "device/overlap.cuh"
#include "device/waiting.cuh"

namespace fuseline {

// fp16 has no more than the kernels of rows in registers and of rows that wait (plans/softmax.h).
template <class T>
constexpr bool kSpecial = !std::is_same_v<T, __half>;

constexpr int most_states(Meet how) {
  return how == Meet::kOne ? 1 : how == Meet::kFour ? 4 : kMostThreads / kWarp * (how == Meet::kCluster ? kMaxCluster : 1);
}

template <class State, Meet kHow>
struct FewRoom {
  alignas(16) State states[most_states(kHow)];
  uint64_t met;
};

// A thread's place in its row.
template <class State, Meet kHow>
struct FewSeat {
  static constexpr bool kClusters = kHow == Meet::kCluster;
  FewRoom<State, kHow>& room;
  int blocks, rank;   // of the row, and of these
  int threads, lane;  // of the row in this block
  int width;          // lanes of a warp that share the row
  int64_t row;

  __device__ __forceinline__ FewSeat(FewRoom<State, kHow>& in, int cluster)
      : room(in),
        blocks(kClusters ? cluster : 1),
        rank(kClusters ? int(blockIdx.x) & (cluster - 1) : 0),
        threads(int(blockDim.x)),
        lane(int(threadIdx.x)),
        width(kHow == Meet::kOne ? min(int(blockDim.x), kWarp) : kWarp),
        row(kClusters                ? int64_t(int(blockIdx.x) / cluster)
            : kHow == Meet::kOne ? int64_t(blockIdx.x) * blockDim.y + threadIdx.y
                                     : int64_t(blockIdx.x)) {
    if constexpr (kClusters) {
      if (threadIdx.x == 0) barrier_init(&room.met, 1);
      publish_barriers();
      cluster_arrive_relaxed();
      __syncwarp();
    }
  }

  // The first of the vectors that the thread has of a row, `threads` apart.
  __device__ __forceinline__ int slot(int held) const { return rank * held * threads + lane; }
  __device__ __forceinline__ int warps() const { return threads / kWarp; }
  __device__ __forceinline__ int count() const { return blocks * warps(); }

  // Shows the state of each warp to all of the row.
  __device__ __forceinline__ void meet(const State& mine) {
    const int warp = lane / kWarp, in_warp = lane % kWarp;
    if constexpr (kClusters) {
      cluster_wait();  // the others' barriers are there
      if (lane == 0) barrier_expect(&room.met, count() * int(sizeof(State)));
      if (in_warp < blocks) send_in_cluster(&room.states[rank * warps() + warp], &room.met, in_warp, mine);
      barrier_wait(&room.met, 0);
    } else {
      if (in_warp == 0) room.states[warp] = mine;
      __syncthreads();
    }
  }
};

}  // namespace fuseline
