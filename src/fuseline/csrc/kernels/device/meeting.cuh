// How the warps of a row agree on a sum while they go on with the next row.
//
// Each warp publishes its state of a row in shared memory (of every block of the cluster that shares the row) and
// arrives at a barrier there; it comes back for the states of all when it has read its part of the row after. So the
// time of a meeting, a microsecond where it goes through a cluster, is spent on work. Barriers are mbarriers: a block
// has as many as it likes, and its rows meet apart from each other.
#pragma once

#include "group.cuh"
#include "vector.cuh"

namespace fuseline {

__device__ __forceinline__ uint32_t shared_address(const void* at) { return uint32_t(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes barriers known to the other blocks of the cluster, before cluster_arrive.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has where this one has `barrier`.
__device__ __forceinline__ void arrive_in_cluster(uint64_t* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .b32 at;\n"
      " mapa.shared::cluster.u32 at, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
#endif
}

// Arrives, and lets the phase end only once `bytes` have been sent to it.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Sends a state to block `rank` of the cluster, where `here` and `barrier` stand in this block. The barrier counts the
// bytes itself: an arrival that released what was stored before would wait for everything this thread ever stored, in
// HBM, too.
template <class State>
__device__ __forceinline__ void send_in_cluster(State* here, uint64_t* barrier, int rank, const State& state) {
  static_assert(sizeof(State) == 8 || sizeof(State) == 16);
#if __CUDA_ARCH__ >= 900
  uint32_t to, at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(here)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(barrier)), "r"(rank));
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&state);
  if constexpr (sizeof(State) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(words[0]), "r"(words[1]), "r"(at)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(at)
                 : "memory");
  }
#endif
}

// Waits for the phase of that parity to end.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  const uint32_t at = shared_address(barrier);
  int done = 0;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n .reg .pred done;\n"
        " mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
        " selp.b32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n .reg .pred done;\n"
        " mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        " selp.b32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
#endif
  } while (!done);
}

// A warp may be three rows ahead of another that still reads states: it waits for each row's meeting only after it has
// published the row after, and nobody publishes that before they are through with the row before.
constexpr int kMeetings = 4;

// Shared memory of a block for the meetings of its rows, at most kRows of them.
template <class State, int kRows, int kStates>
struct MeetingRoom {
  State states[kMeetings][kStates];
  uint64_t barriers[kMeetings][kRows];
};

// One row's side of it, for blocks of (threads of one row, rows). Rows of one warp do not meet. Next to nothing is kept
// in registers from one meeting to the next.
template <class Room, class State>
struct Meeting {
  Room& room;
  int blocks;  // that share the row
  int rank;    // of this block among them

  __device__ __forceinline__ int warps() const { return int(blockDim.x) / kWarp; }
  __device__ __forceinline__ int count() const { return blocks * warps(); }  // of warps that share the row

  // Every thread of the block calls, once; a whole cluster begins together.
  __device__ __forceinline__ void open() {
    if (threadIdx.x < kMeetings) {
      barrier_init(&room.barriers[threadIdx.x][threadIdx.y], blocks == 1 ? warps() : 1);
    }
    if (blocks > 1) {
      publish_barriers();
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // For row number `turn` of this group: every lane of the warp has the warp's state.
  __device__ __forceinline__ void publish(int turn, const State& mine) {
    int thread = threadIdx.x;
    forget(thread);
    publish(turn, mine, int(threadIdx.y), thread / kWarp, thread % kWarp);
  }

  // The same where the group, the warp's place in it and the lane's in the warp are at hand.
  __device__ __forceinline__ void publish(int turn, const State& mine, int group, int warp, int lane) {
    const int meeting = int(uint32_t(turn) % kMeetings);
    State* const slot = &room.states[meeting][group * count() + rank * warps() + warp];
    uint64_t* const barrier = &room.barriers[meeting][group];
    if (blocks == 1) {
      if (lane == 0) {
        *slot = mine;
        barrier_arrive(barrier);
      }
    } else {
      if (warp == 0 && lane == 0) barrier_expect(barrier, count() * int(sizeof(State)));
      if (lane < blocks) send_in_cluster(slot, barrier, lane, mine);
    }
  }

  // The states of all warps of that row, count() of them, valid until the next row but one is published.
  __device__ __forceinline__ const State* await(int turn) { return await(turn, int(threadIdx.y)); }
  __device__ __forceinline__ const State* await(int turn, int group) {
    const int meeting = int(uint32_t(turn) % kMeetings);
    barrier_wait(&room.barriers[meeting][group], int(uint32_t(turn) / kMeetings & 1));
    return &room.states[meeting][group * count()];
  }
};

}  // namespace fuseline
