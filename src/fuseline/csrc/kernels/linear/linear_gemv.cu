// One to four rows of activations times weights of 16 bits, as torch.nn.Linear keeps them; what may stand around the
// layer is that of linear/linear_stream.cuh.
//
// Floor: 2 n k bytes over the copy bandwidth. A multiprocessor has to have 18 KB under way to reach it; 64 to 96 KB are.
// Arithmetic: 8 products and 8 conversions to 16 bytes and row of x, a fifth of what can be issued while they come.
//
// Threads: a warp has two rows of W (of SwiGLU: a gate and what it multiplies), or where these would not fill all places a
// team of warps has one; see `choose`. 16-byte vectors go from memory to registers, each asked for anew as soon as it is
// used, across the ends of rows, so that nothing waits but for data: no barrier but a team's, no copy through shared memory.
// x is in shared memory, normed there by every block anew. The first vectors are on their way before the launch before this
// has ended.

#include "linear_gemv_team.cuh"

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

struct Choice {
  int team;  // warps that share a row of W
  int rows;  // of W that a warp has, where none does; one is shared by two
  bool two;  // blocks a multiprocessor
};

// Two rows a warp fill a GPU's places from 44 rows a multiprocessor on. With less, some multiprocessors get three of the
// blocks that begin as the launch before ends, and others one: 4096 x 4096 takes 12.2 us in two blocks a multiprocessor for
// 14.1 in three; beyond as many rows teams of four even out what is left. Long rows go to whole blocks, of any number: 31.2
// for 37.1 us of 11008 x 4096, 33.9 for 35.9 of 7000 x 7000. Of few rows short ones are better dealt among two warps 512
// bytes in turn (1000 x 1000: 2.1 for 2.8), longer ones in halves (3000 x 3000: 7.0 for 7.4), and where every warp of two
// blocks a multiprocessor has one row, nothing is shared (2000 x 2000: 4.0 for 5.4).
Choice choose(const LinearArguments& a, const Device& device) {
  const int few = 24 * device.processors, of_two = 32 * device.processors, enough = 44 * device.processors;
  if (a.halves) return {0, 2, false};
  const bool one_each = a.m == 1 && a.n > 12 * device.processors && a.n <= 16 * device.processors;
  if (one_each && device.clusters && a.k > 1536 && a.k <= 2048) return {1, 1, true};
  if (a.n < few) return {a.k < 2048 ? 2 : 0, 1, false};
  if (a.m > 1) return {0, 2, false};
  if (a.k > 6144) return {8, 1, false};
  if (a.n <= of_two) return {0, 2, device.clusters};
  return {a.n < enough ? 4 : 0, 2, false};
}

template <class T, int M>
int launch_gemv(const LinearArguments& a, const Device& device, void* stream) {
  const Choice choice = choose(a, device);
  auto kernel = choice.team == 2 ? gemv_team_kernel<T, M, 1, 2, false> : choice.rows == 1 ? gemv_kernel<T, M, 1> : gemv_kernel<T, M, 2>;
  if constexpr (M == 1) {
    if (choice.team == 1) kernel = gemv_team_kernel<T, M, 1, 1, false>;
    if (choice.team == 4) kernel = gemv_team_kernel<T, M, 1, 4, false>;
    if (choice.team == 8) kernel = gemv_team_kernel<T, M, 1, 8, false>;
  }
  const int shared = choice.two ? std::max(M * a.k * 2, kOfTwo) : M * a.k * 2;
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, kLinearThreads, size_t(shared), 1, resident);
  if (error != cudaSuccess) return int(error);
  const int64_t at_once = choice.team ? kLinearWarps / choice.team  // rows of a block
                          : choice.rows == 1 ? kLinearWarps / 2
                                             : 2 * kLinearWarps;
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(std::min<int64_t>(divide_up(a.n, at_once), std::max(1, resident))));
  config.blockDim = dim3(kLinearThreads);
  config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = device.clusters ? 1 : 0;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

template <class T>
int launch_gemv(const LinearArguments& a, const Device& device, void* stream) {
  return a.m == 1   ? launch_gemv<T, 1>(a, device, stream)
         : a.m == 2 ? launch_gemv<T, 2>(a, device, stream)
                    : launch_gemv<T, 4>(a, device, stream);
}

}  // namespace

int launch_gemv_16(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  const int rows = a.m <= 2 ? a.m : 4;
  if (a.m > 4 || !a.x_vectors || a.k == 0 || int64_t(rows) * a.k * 2 > kMostShared) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  if (call.dtype == FUSELINE_FLOAT16) return launch_gemv<__half>(a, device, stream);
  return launch_gemv<__nv_bfloat16>(a, device, stream);
}

}  // namespace fuseline
