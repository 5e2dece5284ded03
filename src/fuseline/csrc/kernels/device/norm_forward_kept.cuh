// The norms' forward of long rows in clusters that stay, with their weights in registers (sm_90): the same results as in
// norm_forward_fetched.cuh, of x of 16 bits alone with weights of rows' dtype.
//
// Moves: as there; limit: HBM bandwidth. Threads: a warp has one piece of each row that its cluster takes, always of the same
// columns, and a ring of pieces: rows are on their way while one is taken and the one before, whose warps have met
// meanwhile, is normalized and leaves.
#pragma once

#include "choice.h"
#include "norm_states.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kKeptWarps = 8, kKeptStages = 6;

template <class T>
__global__ void __launch_bounds__(kKeptWarps* kWarp, 2) norm_forward_kept(const NormForward a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 slots[];
  using Room = MeetingRoom<Moments, 1, kKeptWarps * kMaxCluster>;
  __shared__ __align__(16) Room room;
  __shared__ uint64_t arrived[kKeptWarps][kKeptStages];
  constexpr int kSize = kVector<T>, kElements = kPieceSlots * kSize;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const int rank = int(blockIdx.x) & (a.cluster - 1), first = (rank * warps + warp) * kPieceSlots;
  const int64_t clusters = int(gridDim.x) / a.cluster, begin = int(blockIdx.x) / a.cluster;
  const int turns = int((a.rows - begin + clusters - 1) / clusters);
  uint4* const mine = slots + warp * kKeptStages * kPieceSlots;
  const auto fetch = [&](int turn) {
    if (turn >= turns) return;
    uint64_t* const barrier = &arrived[warp][turn % kKeptStages];
    barrier_expect(barrier, kPieceSlots * 16);
    copy_in(mine + turn % kKeptStages * kPieceSlots,
            static_cast<const T*>(a.x) + (begin + turn * clusters) * a.n + first * kSize, kPieceSlots * 16, barrier);
  };
  let_next_start();
  if (lane < kKeptStages) barrier_init(&arrived[warp][lane], 1);
  publish_barriers();
  __syncwarp();
  wait_for_earlier();
  if (lane == 0) {
    for (int turn = 0; turn < kKeptStages; ++turn) fetch(turn);
  }
  uint4 weight[kPiece], bias[kPiece];
#pragma unroll
  for (int k = 0; k < kPiece; ++k) {
    const int slot = first + k * kWarp + lane;
    weight[k] = a.weight ? __ldg(static_cast<const uint4*>(a.weight) + slot) : ones<T>();
    bias[k] = a.bias ? __ldg(static_cast<const uint4*>(a.bias) + slot) : make_uint4(0, 0, 0, 0);
  }
  Meeting<Room, Moments> meeting{room, a.cluster, rank};
  meeting.open();
  const float inverse_n = __fdividef(1.f, float(int(a.n)));
#pragma unroll 1
  for (int turn = 0; turn <= turns; ++turn) {
    if (turn < turns) {
      const uint4* const part = mine + turn % kKeptStages * kPieceSlots + lane;
      barrier_wait(&arrived[warp][turn % kKeptStages], turn / kKeptStages & 1);
      float near = 0.f, values[kSize];
      if (a.centred) {
        unpack<T>(part[0], values);
#pragma unroll
        for (int i = 1; i < kSize; ++i) values[0] += values[i];
        near = sum_over_warp(values[0]) * (1.f / (kWarp * kSize));
      }
      float2 sums = make_float2(0.f, 0.f);  // of distances from it, and of their squares
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        unpack<T>(part[k * kWarp], values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float apart = values[i] - near;
          sums.x += apart;
          sums.y = fmaf(apart, apart, sums.y);
        }
      }
      sums = sum_over_warp(sums);
      meeting.publish(turn, a.centred ? about_mean(near, sums, float(kElements), 1.f / kElements)
                                      : Moments{0.f, sums.y, float(kElements), 0.f});
    }
    if (turn == 0) continue;
    const int64_t row = begin + (turn - 1) * clusters;
    const Moments whole =
        combine_near(meeting.await(turn - 1), meeting.count(), float(int(a.n)), inverse_n, a.centred);
    const float rstd = rstd_of<T>(whole.squares, inverse_n, a.eps);
    const Standard<T> standard(whole.mean, rstd);
    if (rank == 0 && threadIdx.x == 0) keep_statistics(a, row, whole.mean, rstd);
    uint4* const part = mine + (turn - 1) % kKeptStages * kPieceSlots;
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      float values[kSize], weights[kSize], biases[kSize];
      unpack<T>(part[k * kWarp + lane], values);
      make_ready(weight[k].x), make_ready(weight[k].y), make_ready(weight[k].z), make_ready(weight[k].w);  // packed
      make_ready(bias[k].x), make_ready(bias[k].y), make_ready(bias[k].z), make_ready(bias[k].w);
      unpack<T>(weight[k], weights);
      unpack<T>(bias[k], biases);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weights[i], biases[i]);
      part[k * kWarp + lane] = pack<T>(values);
    }
    show_to_copies();
    __syncwarp();
    if (lane > 0) continue;
    copy_out(static_cast<T*>(a.y) + row * a.n + first * kSize, part, kPieceSlots * 16);
    if (turn >= 2) {  // all but what has just been sent is read
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      fetch(turn - 2 + kKeptStages);
    }
  }
  if (lane == 0) wait_for_copies_out();
#endif
}

// A layout to be measured, told from others by 400 vectors: for `stages` rows a cluster, or with 1 for as many as there are.
template <class T>
bool run_kept(NormForward a, const Device& device, void* stream, int& error) {
  const RowOverride& measured = row_overrides[FUSELINE_LAYER_NORM_FORWARD];
  const RowChoice& choice = measured.choice;
  if (!measured.given || choice.held != 400 || sizeof(T) == 4 || ((a.weight || a.bias) && a.fp32_weights)) return false;
  const int warps = choice.block / kWarp;
  if (warps > kKeptWarps || choice.cluster > kMaxCluster || a.n != int64_t(choice.cluster) * warps * kPieceSlots * kVector<T>) {
    return error = FUSELINE_UNSUPPORTED, true;
  }
  a.cluster = choice.cluster;
  const size_t bytes = size_t(warps) * kKeptStages * kPieceSlots * 16;
  int count = 0;
  error = int(resident_clusters(norm_forward_kept<T>, device, warps * kWarp, bytes, a.cluster, count));
  if (error || count == 0) return error = error ? error : FUSELINE_UNSUPPORTED, true;
  const int64_t grid = choice.stages == 1 ? std::min<int64_t>(count, a.rows) : divide_up(a.rows, choice.stages);
  error = launch(norm_forward_kept<T>, a, grid * a.cluster, dim3(warps * kWarp), bytes, a.cluster, stream, true);
  return true;
}

}  // namespace fuseline
