// One to four rows of activations times weights of 16 bits, as torch.nn.Linear keeps them; what may stand around the
// layer is that of linear/linear_stream.cuh.
//
// Floor: 2 n k bytes over the copy bandwidth. A multiprocessor has to have 18 KB under way to reach it; 64 to 96 KB are.
// Arithmetic: 8 products and 8 conversions to 16 bytes and row of x, a fifth of what can be issued while they come.
//
// Threads: a warp has two rows of W (of SwiGLU: a gate and what it multiplies), or where these would not fill all places a
// team of warps has one; see choose_gemv in plans/linear_few_rows.h. 16-byte vectors go from memory to registers, each asked for anew as soon as it is
// used, across the ends of rows, so that nothing waits but for data: no barrier but a team's, no copy through shared memory.
// x is in shared memory, normed there by every block anew. The first vectors are on their way before the launch before this
// has ended.

#include "linear_gemv_team.cuh"
#include "linear_kernels.h"

namespace fuseline {
namespace {

// R rows of W to a warp, kAhead vectors of each under way; one row is shared by two warps, half of it each, so that rows
// divide more evenly.
template <class T, int M, int R>
__global__ void __launch_bounds__(kLinearThreads, M == 1 ? 3 : 2) gemv_kernel(const __grid_constant__ LinearArguments a) {
  constexpr int kAhead = 8 / R, kStep = kAhead * kWarp, kShare = R == 1 ? 2 : 1;
  extern __shared__ __align__(16) char shared[];
  __shared__ float room[kLinearWarps];
  __shared__ float of_others[2][kLinearWarps / kShare][M];  // sums of the second warps, of one row and the next
  const uint4* const x = reinterpret_cast<const uint4*>(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int vectors = a.k / 8, team = warp / kShare, begin = (vectors + kShare - 1) / kShare * (warp % kShare);
  const int end = min(vectors, begin + (vectors + kShare - 1) / kShare);
  const int chunks = ((vectors + kShare - 1) / kShare + kStep - 1) / kStep;
  const int halves = a.halves ? a.n / 2 : 0;
  const int units = halves ? halves : (a.n + R - 1) / R;
  // The last round, which not all warps have, is spread over all blocks.
  const int first = team * int(gridDim.x) + int(blockIdx.x), step = int(gridDim.x) * (kLinearWarps / kShare);
  const auto row_of = [&](int unit, int r) { return halves ? unit + r * halves : unit * R + r; };

  const uint4* from[R];
  int ahead_unit = first, ahead_chunk = 0;
  const auto point = [&] {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = min(row_of(ahead_unit, r), a.n - 1);
      from[r] = reinterpret_cast<const uint4*>(a.weight + row * a.weight_stride);
    }
  };
  uint4 raw[R][kAhead];
  const auto load = [&](int u) {
    const int at = begin + ahead_chunk * kStep + u * kWarp + lane;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      raw[r][u] = make_uint4(0, 0, 0, 0);
      if (ahead_unit < units && at < end) raw[r][u] = load_once(from[r] + at);
    }
  };
  const auto go_on = [&] {
    if (++ahead_chunk == chunks) {
      ahead_chunk = 0, ahead_unit += step;
      if (ahead_unit < units) point();
    }
  };

  prefetch_norm<kLinearThreads>(a);
  if (first < units) point();
  if (!a.overlap) {
    if (lane < R && first < units && begin < end) {  // towards the L2 at least, while the launch before may still be at work
      const int row = min(row_of(first, lane), a.n - 1);
      prefetch_to_l2(a.weight + row * a.weight_stride + begin * 16, min(2 * kStep, end - begin) * 16);
    }
    wait_for_earlier();
  }
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load(u);
  go_on();
  if (a.overlap) wait_for_earlier();
  let_next_start();
  fetch_normed<T, M>(a, reinterpret_cast<uint4*>(shared), room);

  [[maybe_unused]] int turn = 0;
  for (int unit = first; unit < units; unit += step) {
    float sums[R][M] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int at = min(begin + chunk * kStep + u * kWarp + lane, vectors - 1);  // past the end weights are zero
        float w[R][8];
#pragma unroll
        for (int r = 0; r < R; ++r) unpack<T>(raw[r][u], w[r]);
        load(u);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          float values[8];
          unpack<T>(x[m * vectors + at], values);
#pragma unroll
          for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[r][m] = fmaf(w[r][e], values[e], sums[r][m]);
          }
        }
      }
      go_on();
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) {
          sums[r][m] += __shfl_xor_sync(~0u, sums[r][m], offset);
        }
      }
    }
    if constexpr (kShare == 2) {
      float(&those)[M] = of_others[turn][team];
      if (warp % 2 == 1 && lane == 0) {
#pragma unroll
        for (int m = 0; m < M; ++m) those[m] = sums[0][m];
      }
      meet_team<kShare>(team);
      turn ^= 1;
      if (warp % 2 == 1) continue;
#pragma unroll
      for (int m = 0; m < M; ++m) sums[0][m] += those[m];
    }
    // Lane R m + r writes the output of its row of x and of W.
    const int m_of = lane / R, r_of = lane % R, row = row_of(unit, r_of);
    if (m_of >= a.m || m_of >= M || row >= a.n || (halves && r_of)) continue;
    float sum = 0.f, other = 0.f;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (m == m_of && r == r_of) sum = sums[r][m];
        if (m == m_of && r == R - 1) other = sums[r][m];
      }
    }
    write_output<T>(a, sum, other, m_of, row, halves);
  }
}

template <class T, int M>
LinearFunction kernel_of(const LinearPlan& plan) {
  if constexpr (M == 1) {
    if (plan.team == 1) return gemv_team_kernel<T, M, 1, 1>;
    if (plan.team == 4) return gemv_team_kernel<T, M, 1, 4>;
    if (plan.team == 8) return gemv_team_kernel<T, M, 1, 8>;
  }
  if (plan.team == 2) return gemv_team_kernel<T, M, 1, 2>;
  return plan.weight_rows == 1 ? gemv_kernel<T, M, 1> : gemv_kernel<T, M, 2>;
}

template <class T>
LinearFunction kernel_of(const LinearPlan& plan) {
  return plan.x_rows == 1 ? kernel_of<T, 1>(plan) : plan.x_rows == 2 ? kernel_of<T, 2>(plan) : kernel_of<T, 4>(plan);
}

}  // namespace

LinearFunction gemv_kernel_of(const LinearPlan& plan, bool bf16) {
  return bf16 ? kernel_of<__nv_bfloat16>(plan) : kernel_of<__half>(plan);
}

}  // namespace fuseline
