// How the blocks of a decoding step that share a context meet in a cluster: out of each other's shared memory.
#pragma once

#include "decode_call.cuh"
#include "device/meeting.cuh"
#include "device/softmax_parts.cuh"

namespace fuseline {

// Where a block receives the parts of what it adds up for its cluster of 2, 4 or 8: so many elements of each head.
template <int D, int G>
struct Inbox {
  alignas(8) float sums[G * D];   // of each block, head by head
  float2 weights[kClustered][G];  // most and total
  uint64_t arrived;

  // All threads of a cluster, at once; nobody sends before `cluster_wait`.
  __device__ __forceinline__ void open(int blocks, int heads) {
    if (threadIdx.x == 0) {
      barrier_init(&arrived, 1);
      publish_barriers();
      barrier_expect(&arrived, heads * (D * int(sizeof(float)) + blocks * int(sizeof(float2))));
    }
    cluster_arrive();
  }
  static __device__ __forceinline__ int shift(int blocks) {  // D / blocks is two to that
    return __clz(blocks) - __clz(D);
  }

  // Elements d and d + 1 of head g, to the block that adds them up.
  __device__ __forceinline__ void send(int g, int d, float2 parts, int rank, int blocks) {
    const int of = shift(blocks), to = d >> of, each = 1 << of;
    send_in_cluster(reinterpret_cast<float2*>(sums + (rank * G + g) * each + (d & (each - 1))), &arrived, to, parts);
  }
  __device__ __forceinline__ void send_weights(int g, float most, float total, int rank, int to) {
    send_in_cluster(&weights[rank][g], &arrived, to, make_float2(most, total));
  }

  template <class T>
  __device__ __forceinline__ void add_up(int rank, int blocks, int heads, T* y) {
    barrier_wait(&arrived, 0);
    const int of = shift(blocks), each = 1 << of;
    for (int i = threadIdx.x; i < heads << of; i += kDecodeThreads) {
      const int g = i >> of;
      float highest = -kInfinity, together = 0.f, all = 0.f;
#pragma unroll
      for (int s = 0; s < kClustered; ++s) {
        if (s < blocks) highest = fmaxf(highest, weights[s][g].x);
      }
#pragma unroll
      for (int s = 0; s < kClustered; ++s) {
        if (s >= blocks) break;
        const float kept = weight_of(weights[s][g].x, highest);
        together = fmaf(kept, sums[s * G * each + i], together);
        all = fmaf(kept, weights[s][g].y, all);
      }
      y[g * D + rank * each + (i & (each - 1))] = from_float<T>(together / all);
    }
  }
};

}  // namespace fuseline
