// How softmax lays out rows so few that all their threads run at once, and how these meet.
#pragma once

#include "few_rows.cuh"
#include "launch.cuh"
#include "overlap.cuh"
#include "waiting.cuh"

namespace fuseline {

// Rows of a few warps, no more of them than multiprocessors, have a vector a thread: 4 x 1,024 elements of 16 bits 1.64
// us, 128 x 1,024 1.93, and in a warp that holds four vectors 1.73 and 1.99; 512 rows 6.05, and 2.91.
inline RowPlan plan_few_softmax(int64_t rows, int64_t vectors, int held_by_warp, const Device& device) {
  const bool few_warps = vectors > kWarp && vectors <= int64_t(held_by_warp) * kWarp;
  if (few_warps && rows <= device.processors) return plan_spread(rows, vectors, 1, 1, 1, device);
  return plan_few(rows, vectors, held_by_warp, device);
}

struct FewRows {
  int held = 0;     // vectors of a thread; 0: rows are too many, or too long
  int threads = 0;  // of a block that share a row
  int beside = 1;   // rows of a block
  int cluster = 1;  // blocks of a row
};

// A vector a thread while all threads that run at once are enough for that, two of rows twice as many. Rows of more than a
// warp are no more than multiprocessors. In us, of 16 bits: 128 x 768 forward 1.32 where softmax_forward_rows takes 1.81 (with
// four vectors in a warp 1.41, three 1.34), backward 1.13 and 1.52; 4 x 16,384 backward 1.46 and 2.46 (blocks of 256 threads
// 1.47, of 512 1.54), 128 x 16,384 forward 4.99 and 6.50. takes_four: four vectors a thread of the longest rows too, 128 x
// 65,536 forward in 13.62, waiting in shared memory 16.07 (in ten other layouts there 15.87 and more), by blocks of 512 threads
// 14.82, by those of two vectors 15.99; of 512 rows 51.2 any way.
inline FewRows plan_few_rows(int64_t rows, int64_t vectors, bool takes_four, const Device& device) {
  FewRows plan;
  const int64_t at_once = int64_t(device.processors) * 1024, most = int64_t(device.clusters ? kMaxCluster : 1) * kMostThreads;
  if (rows > device.processors && vectors > kWarp) return plan;
  const bool two = rows * vectors > at_once || vectors > most, four = rows * vectors > 2 * at_once;
  if (four && !(takes_four && device.clusters && vectors > most && vectors <= 2 * most)) return plan;
  const int held = four ? 4 : two ? 2 : 1;
  if (vectors > kWarp * held) {
    const int64_t block = four ? 256 : rows * 4 <= device.processors ? 128 : kMostThreads;
    while (device.clusters && plan.cluster < kMaxCluster && vectors > plan.cluster * block * held) plan.cluster *= 2;
    plan.threads = int(divide_up(divide_up(vectors, held * plan.cluster), kWarp)) * kWarp;
  } else {
    plan.threads = power_of_two_from(divide_up(vectors, held));
    const int a_warp = kWarp / plan.threads;
    const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
    plan.beside = int(std::min<int64_t>(kShortRowBlock / plan.threads, spread));
  }
  plan.held = plan.threads > kMostThreads ? 0 : held;
  return plan;
}

// How a row's warps meet: kOne has it, kFour read each other's states, kBlock a lane each, kCluster across blocks.
enum class Meet { kOne, kFour, kBlock, kCluster };

inline Meet meeting_of(const FewRows& plan) {
  if (plan.cluster > 1) return Meet::kCluster;
  const int warps = plan.threads / kWarp;
  return warps <= 1 ? Meet::kOne : warps <= 4 ? Meet::kFour : Meet::kBlock;
}

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
