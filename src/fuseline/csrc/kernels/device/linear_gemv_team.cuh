// A product of a few rows of x with weights of 16 bits, each row of these by a team of warps.
#pragma once

#include "linear_gemv.cuh"
#include "linear_shifted.cuh"

namespace fuseline {

// A row of W to a team, of which each warp has every kTeamWarps-th 512 bytes; kAhead of these under way, across the ends of
// rows. All blocks are there from the start: they have as many rows but for one.
template <class T, int M, int kTeamWarps, bool kShifted>
__global__ void __launch_bounds__(kLinearThreads, M == 1 ? 3 : 2) gemv_team_kernel(const __grid_constant__ LinearArguments a) {
  constexpr int kAhead = 7, kTeams = kLinearWarps / kTeamWarps, kStep = kTeamWarps * kWarp;
  extern __shared__ __align__(16) char shared[];
  __shared__ float room[kShifted ? 1 : kLinearWarps];
  __shared__ float parts[2][kTeams][kTeamWarps][M];  // of one row and the next
  __shared__ RowEnds ends;
  const uint4* const x = reinterpret_cast<const uint4*>(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, team = warp / kTeamWarps, rank = warp % kTeamWarps;
  const int first = team * int(gridDim.x) + int(blockIdx.x), stride = int(gridDim.x) * kTeams;
  const int head = kShifted ? head_of_row(a, first) : 0, vectors = (head + a.k + 7) / 8;
  const int steps = (vectors + kStep - 1) / kStep, begin = rank * kWarp + lane;

  int row_ahead = first, at_ahead = begin;
  const uint4* from = nullptr;
  const auto point = [&] { from = reinterpret_cast<const uint4*>(a.weight + row_ahead * a.weight_stride - 2 * head); };
  uint4 raw[kAhead];
  const auto load = [&](int u) {
    raw[u] = make_uint4(0, 0, 0, 0);
    if (row_ahead >= a.n) return;
    const bool outside = kShifted && RowEnds::may_reach_out(a, row_ahead, at_ahead, vectors);
    if (at_ahead < vectors && !outside) raw[u] = load_once(from + at_ahead);
    at_ahead += kStep;
    if (at_ahead >= steps * kStep) {
      at_ahead = begin, row_ahead += stride;
      if (row_ahead < a.n) point();
    }
  };

  prefetch_norm<kLinearThreads>(a);
  if (first < a.n) point();
  if (!a.overlap) {
    // Towards the L2 at least, while the launch before may still be at work.
    constexpr int kEnds = kShifted ? 1 : 0;  // which may lie out of the weight
    const int count = min(kAhead * kStep, vectors - kEnds) - kEnds;
    if (rank == 0 && lane == 0 && first < a.n && count > 0) {
      prefetch_to_l2(reinterpret_cast<const char*>(from + kEnds), count * 16);
    }
    wait_for_earlier();
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(u);
  if (a.overlap) wait_for_earlier();
  let_next_start();
  if constexpr (kShifted) {
    fetch_shifted<M>(a, reinterpret_cast<uint4*>(shared), ends, head, vectors);
  } else {
    fetch_normed<T, M>(a, reinterpret_cast<uint4*>(shared), room);
  }

  float sums[M] = {};
  int turn = 0, at = begin;
  for (int row = first; row < a.n;) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (row >= a.n) break;
      float w[8];
      unpack<T>(kShifted ? ends.trim(a, raw[u], row, at, vectors) : raw[u], w);
      load(u);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float values[8];
        unpack<T>(x[m * vectors + min(at, vectors - 1)], values);  // past the end weights are zero
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[m] = fmaf(w[e], values[e], sums[m]);
      }
      at += kStep;
      if (at < steps * kStep) continue;
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) sums[m] += __shfl_xor_sync(~0u, sums[m], offset);
        if (lane == 0) parts[turn][team][rank][m] = sums[m];
        sums[m] = 0.f;
      }
      meet_team<kTeamWarps>(team);
      if (rank == 0 && lane < min(M, a.m)) {  // lane m writes the output of row m of x
        float sum = 0.f;
#pragma unroll
        for (int r = 0; r < kTeamWarps; ++r) sum += parts[turn][team][r][lane];
        write_output<T>(a, sum, 0.f, lane, row, 0);
      }
      turn ^= 1, at = begin, row += stride;
    }
  }
}

}  // namespace fuseline
