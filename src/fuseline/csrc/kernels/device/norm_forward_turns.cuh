// RMS norms of rows of 16 bits too long for other clusters' registers, in turns (sm_90): clusters stay and take row after row, each
// thread the same columns of all of them, whose weights it has in registers.
//
// Moves: x read once, y written once. Limit: HBM bandwidth. A warp has a ring of its parts of rows, which come in bulk copies, those
// of later rows while earlier ones are computed. Its sum of a row goes to all of the row's warps, and it comes back for theirs when
// it has read its part of the row after; until then the row waits in registers. us of bf16, by blocks that end with their row
// (norm_forward_fetched.cuh) and so: 32 and 128 x 131,072 10.8 and 9.6, 31.2 and 26.6, 32, 128 and 512 x 262,144 17.8 and 17.0, 55.5
// and 50.4, 193.1 and 191.2; 512 x 131,072 99.0 and 100.6 (not taken). In clusters of 8 9.7, 26.5 and 101.5 at 131,072; with y in
// the place of x and bulk copies out 10.2, 27.6, 102.3, and 18.1, 53.7, 196.6 at 262,144; eight vectors a thread, a ring of three
// 12.8, 31.9, 110, and 19.5, 58.2, 213; in registers alone 10.9 to 11.9, 33.0, 111 to 117, and 20.2, 63.9, 229.
#pragma once

#include "launch.cuh"
#include "norm.cuh"
#include "norm_row.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kTurnVectors = 4;  // of a row in each thread
constexpr int kTurnRing = 6;     // rows of a block at a time

struct NormTurns {
  const uint4 *x, *weight;
  uint4* y;
  float* rstd;
  int rows, vectors, part;  // vectors of a row, and of a warp's part of it
  float inverse_n, eps;
};

struct alignas(8) TurnSum {
  float squares, rest;
};

struct TurnRoom {
  alignas(16) TurnSum sums[kMeetings][kMostBlocks * kMostThreads / kWarp];
  uint64_t met[kMeetings];
  uint64_t arrived[kMostThreads / kWarp][kTurnRing];
};

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1) norm_forward_turns(const NormTurns a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 ring[];
  constexpr int kSize = kVector<T>, kHeld = kTurnVectors;
  __shared__ TurnRoom room;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const int rank = int(blockIdx.x) % kMostBlocks, place = rank * warps + warp, count = kMostBlocks * warps;
  const int clusters = int(gridDim.x) / kMostBlocks, begin = int(blockIdx.x) / kMostBlocks;
  const int turns = (a.rows - begin + clusters - 1) / clusters;
  const int first = place * a.part, own = min(max(a.vectors - first, 0), a.part);
  uint4* const slots = ring + warp * kTurnRing * a.part;
  uint64_t* const arrived = room.arrived[warp];
  let_next_start();
  if (lane == 0) {
    for (int slot = 0; slot < kTurnRing; ++slot) barrier_init(&arrived[slot], 1);
  }
  if (threadIdx.x < kMeetings) barrier_init(&room.met[threadIdx.x], 1);
  publish_barriers();
  cluster_arrive_relaxed();
  __syncwarp();
  const auto start_of = [&](int turn) { return int64_t(begin + turn * clusters) * a.vectors + first; };
  const auto fetch = [&](int turn, int slot) {
    barrier_expect(&arrived[slot], own * 16);
    if (own > 0) copy_in(slots + slot * a.part, a.x + start_of(turn), own * 16, &arrived[slot]);
  };
  wait_for_earlier();
  if (lane == 0) {
    for (int turn = 0; turn < min(kTurnRing, turns); ++turn) fetch(turn, turn);
  }
  uint4 weight[kHeld], kept[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    weight[k] = ones<T>();
    if (a.weight && k * kWarp + lane < own) weight[k] = __ldg(a.weight + first + k * kWarp + lane);
  }
  cluster_wait();  // the others' barriers are there
  int slot = 0, phase = 0;
#pragma unroll 1
  for (int turn = 0; turn <= turns; ++turn) {
    uint4 raw[kHeld];
    if (turn < turns) {
      barrier_wait(&arrived[slot], phase);
      float squares[2] = {0.f, 0.f};
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        raw[k] = k * kWarp + lane < own ? slots[slot * a.part + k * kWarp + lane] : make_uint4(0, 0, 0, 0);
        float values[kSize];
        unpack<T>(raw[k], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) squares[i % 2] = fmaf(values[i], values[i], squares[i % 2]);
      }
      const TurnSum mine{sum_over_warp(squares[0] + squares[1]), 0.f};
      uint64_t* const met = &room.met[turn % kMeetings];
      if (threadIdx.x == 0) barrier_expect(met, count * int(sizeof(TurnSum)));
      if (lane < kMostBlocks) send_in_cluster(&room.sums[turn % kMeetings][place], met, lane, mine);
      __syncwarp();
      if (lane == 0 && turn + kTurnRing < turns) fetch(turn + kTurnRing, slot);
      if (++slot == kTurnRing) slot = 0, phase ^= 1;
    }
    if (turn > 0) {
      const int last = turn - 1;
      barrier_wait(&room.met[last % kMeetings], last / kMeetings & 1);
      float squares = 0.f;
#pragma unroll 1
      for (int i = lane; i < count; i += kWarp) squares += room.sums[last % kMeetings][i].squares;
      const float rstd = rstd_of<T>(sum_over_warp(squares), a.inverse_n, a.eps);
      if (a.rstd && rank == 0 && threadIdx.x == 0) a.rstd[begin + last * clusters] = rstd;
      const Standard<T> standard(0.f, rstd);
      uint4* const y = a.y + start_of(last) + lane;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (k * kWarp + lane >= own) continue;
        float values[kSize], weights[kSize];
        unpack<T>(kept[k], values);
        unpack<T>(weight[k], weights);
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = standard(values[i]) * weights[i];
        y[k * kWarp] = pack<T>(values);
      }
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) kept[k] = raw[k];
  }
  cluster_arrive();  // nobody leaves while others send to it
  cluster_wait();
#endif
}

// ---- host ----

constexpr int64_t kFewestTurns = 32;       // rows
constexpr int64_t kLeastInTurns = 8192;    // vectors of a row, that it has more of,
constexpr int64_t kAlwaysInTurns = 16384;  // and beyond which many rows are taken, too

// Rows in 16-byte steps, with weights of their dtype. False for those that it does not take.
template <class T>
bool run_turns(const NormForward& a, const Device& device, void* stream, int& error) {
  const int64_t vectors = a.n / kVector<T>, most = int64_t(kMostBlocks) * kMostThreads * kTurnVectors;
  if (!device.clusters || a.centred || a.bias || (a.fp32_weights && a.weight)) return false;
  if (vectors <= kLeastInTurns || vectors > most || a.rows < kFewestTurns || a.rows > INT32_MAX) return false;
  if (a.rows > device.processors && vectors <= kAlwaysInTurns) return false;
  const int warps = int(divide_up(vectors, int64_t(kMostBlocks) * kTurnVectors * kWarp)), threads = warps * kWarp;
  const int part = int(divide_up(divide_up(vectors, kMostBlocks * warps), 8) * 8);
  const size_t bytes = size_t(part) * kTurnRing * warps * 16;
  const auto kernel = norm_forward_turns<T>;
  int count = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (resident_clusters(kernel, device, threads, bytes, kMostBlocks, count) != cudaSuccess || count == 0) {
    cudaGetLastError();  // larger clusters than all devices have
    return false;
  }
  const NormTurns turns{static_cast<const uint4*>(a.x), static_cast<const uint4*>(a.weight), static_cast<uint4*>(a.y),
                        a.rstd,                         int(a.rows),                         int(vectors),
                        part,                           float(1.0 / double(a.n)),            a.eps};
  error = launch(kernel, turns, std::min<int64_t>(a.rows, count) * kMostBlocks, dim3(unsigned(threads)), bytes, kMostBlocks,
                 stream, true);
  return true;
}

}  // namespace fuseline
