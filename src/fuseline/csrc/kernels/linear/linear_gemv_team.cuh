// A product of a few rows of x with weights of 16 bits, each row of these by a team of warps.
#pragma once

#include "linear_gemv.cuh"

namespace fuseline {

// R rows of W at a time to a team, of which each warp has every kTeamWarps-th 512 bytes; kAhead of these under way, across the
// ends of rows. All blocks are there from the start: they have as many rows but for R.
template <class T, int M, int R, int kTeamWarps>
__global__ void __launch_bounds__(kLinearThreads, M == 1 ? 3 : 2) gemv_team_kernel(const __grid_constant__ LinearArguments a) {
  constexpr int kAhead = R == 1 ? 7 : 8 / R, kTeams = kLinearWarps / kTeamWarps, kStep = kTeamWarps * kWarp;
  extern __shared__ __align__(16) char shared[];
  __shared__ float room[kLinearWarps];
  __shared__ float parts[2][kTeams][kTeamWarps][R * M];  // of some rows and the next
  const uint4* const x = reinterpret_cast<const uint4*>(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, team = warp / kTeamWarps, rank = warp % kTeamWarps;
  const int first = team * int(gridDim.x) + int(blockIdx.x), stride = int(gridDim.x) * kTeams;
  const int vectors = (a.k + 7) / 8, steps = (vectors + kStep - 1) / kStep, begin = rank * kWarp + lane;

  int row_ahead = first, at_ahead = begin;
  const int64_t to_next = stride * a.weight_stride / 16;  // vectors from one of the R rows to the next
  const uint4* from = nullptr;
  const auto point = [&] { from = reinterpret_cast<const uint4*>(a.weight + row_ahead * a.weight_stride); };
  uint4 raw[kAhead][R];
  const auto load = [&](int u) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = row_ahead + r * stride;
      raw[u][r] = make_uint4(0, 0, 0, 0);
      if (row < a.n && at_ahead < vectors) raw[u][r] = load_once(from + r * to_next + at_ahead);
    }
    if (row_ahead >= a.n) return;
    at_ahead += kStep;
    if (at_ahead >= steps * kStep) {
      at_ahead = begin, row_ahead += R * stride;
      if (row_ahead < a.n) point();
    }
  };

  prefetch_norm<kLinearThreads>(a);
  if (first < a.n) point();
  if (!a.overlap) {
    // Towards the L2 at least, while the launch before may still be at work.
    const int count = min(kAhead * kStep, vectors);
    if (rank == 0 && lane == 0 && first < a.n && count > 0) prefetch_to_l2(reinterpret_cast<const char*>(from), count * 16);
    wait_for_earlier();
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(u);
  if (a.overlap) wait_for_earlier();
  let_next_start();
  fetch_normed<T, M>(a, reinterpret_cast<uint4*>(shared), room);

  float sums[R][M] = {};
  int turn = 0, at = begin;
  for (int row = first; row < a.n;) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (row >= a.n) break;
      float w[R][8];
#pragma unroll
      for (int r = 0; r < R; ++r) unpack<T>(raw[u][r], w[r]);
      load(u);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float values[8];
        unpack<T>(x[m * vectors + min(at, vectors - 1)], values);  // past a row's end weights are zero
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sums[r][m] = fmaf(w[r][e], values[e], sums[r][m]);
        }
      }
      at += kStep;
      if (at < steps * kStep) continue;
#pragma unroll
      for (int i = 0; i < R * M; ++i) {
        float& sum = sums[i / M][i % M];
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (lane == 0) parts[turn][team][rank][i] = sum;
        sum = 0.f;
      }
      meet_team<kTeamWarps>(team);
      const int m = lane % M, own = row + lane / M * stride;  // lane M r + m writes the output of rows m of x and r of W
      if (rank == 0 && lane < R * M && m < a.m && own < a.n) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kTeamWarps; ++w) sum += parts[turn][team][w][lane];
        write_output<T>(a, sum, 0.f, m, own, 0);
      }
      turn ^= 1, at = begin, row += R * stride;
    }
  }
}

}  // namespace fuseline
