// The norms' forward of a sum that is made on the way and returned, for rows that come to shared memory in bulk copies and
// leave it so (sm_90): the same results as in norm_forward_rows.cuh, sum = residual + dropout(x + x_bias) and its norm.
//
// Moves: x and residual read once, y and sum written once. Does: about 15 operations an element, and 15 more for a mask.
// Limit: HBM bandwidth. Threads: a row belongs to some warps of a block, which has several such groups, or to the blocks of
// a cluster. Each warp has neighbouring columns, the same ones row after row, and a ring of its own: rows ahead are on their
// way while a mask is computed, the sum takes the place of the residual, y that of x, and both leave in bulk copies.
#include "norm_row.cuh"
#include "device/waiting.cuh"

namespace fuseline {

using norm_forward_plans::kAddedHeld;
using norm_forward_plans::kAddedMost;
using norm_forward_plans::kAddedStages;

struct AddedNorm {
  NormForward norm;
  int stages;
};

struct AddedStates {
  Moments* first;
  int count;
  __device__ __forceinline__ Moments* operator[](int meeting) const { return first + meeting * count; }
};

struct AddedRoom {
  AddedStates states;
  uint64_t (*barriers)[kAddedMost / kWarp];
};

template <class X, class Y>
struct AddedPart {
  static constexpr int kSize = kVector<Y>, kColumns = kAddedHeld * kWarp * kSize;  // of a warp
  static constexpr int kX = kColumns * int(sizeof(X)), kBytes = kX + kColumns * int(sizeof(Y));
};

// Sends what all lanes of a warp have put, as one group of copies.
__device__ __forceinline__ void send_part(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  show_to_copies();
  __syncwarp();
  if (threadIdx.x % kWarp > 0) return;
  if (bytes > 0) {
    copy_out(to, from, bytes);
  } else {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
#endif
}

template <class X, class Y>
__global__ void __launch_bounds__(kAddedMost, 1) norm_forward_added(const AddedNorm given) {
#if __CUDA_ARCH__ >= 900
  using Part = AddedPart<X, Y>;
  constexpr int kSize = Part::kSize, kHeld = kAddedHeld, kXVectors = kSize / kVector<X>;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kAddedStages][kAddedMost / kWarp], met[kMeetings][kAddedMost / kWarp];
  const NormForward& a = given.norm;
  const int n = int(a.n), stages = given.stages;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  const int place = int(threadIdx.y) * warps + warp;
  const int cluster = a.cluster, rank = int(blockIdx.x) & (cluster - 1);  // of blocks that share a row
  const int from = (rank * warps + warp) * Part::kColumns, start = from + lane * kSize;
  const int elements = max(min(n - from, Part::kColumns), 0);  // of this warp
  const bool alone = cluster * warps == 1;                     // a row has one warp
  const int64_t apart = int64_t(int(gridDim.x) / cluster) * blockDim.y;
  int64_t row = int64_t(int(blockIdx.x) / cluster) * blockDim.y + threadIdx.y;

  const int stage_bytes = int(blockDim.y) * warps * Part::kBytes;
  unsigned char* const mine = ring + place * Part::kBytes;
  const auto fetch = [&](int64_t of, int stage) {
    if (of >= a.rows) return;
    unsigned char* const to = mine + stage * stage_bytes;
    uint64_t* const barrier = &arrived[stage][place];
    barrier_expect(barrier, elements * int(sizeof(X) + sizeof(Y)));
    if (elements == 0) return;
    copy_in(to, static_cast<const X*>(a.residual) + of * a.n + from, elements * int(sizeof(X)), barrier);
    copy_in(to + Part::kX, static_cast<const Y*>(a.x) + of * a.n + from, elements * int(sizeof(Y)), barrier);
  };
  let_next_start();
  if (lane < stages) barrier_init(&arrived[lane][place], 1);
  publish_barriers();
  __syncwarp();
  wait_for_earlier();
  if (lane == 0) {
    for (int stage = 0; stage < stages; ++stage) fetch(row + stage * apart, stage);
  }
  AddedRoom room{{reinterpret_cast<Moments*>(ring + stages * stage_bytes), int(blockDim.y) * cluster * warps}, met};
  Meeting<AddedRoom, Moments> meeting{room, cluster, rank};
  if (!alone) meeting.open();

  const float inverse_n = 1.f / float(n), inverse = alone ? inverse_n : 1.f / float(max(elements, 1));
  const uint64_t seed = a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int turn = 0; row < a.rows; ++turn, row += apart) {
    unsigned char* const parts = mine + stage * stage_bytes;
    uint4* const sums = reinterpret_cast<uint4*>(parts);
    uint4* const branch = reinterpret_cast<uint4*>(parts + Part::kX);
    int64_t base = row * a.n;
    forget(base);  // kept, rather than multiplied anew for each slot
    float values[kHeld][kSize];
    barrier_wait(&arrived[stage][place], parity);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int column = start + k * kWarp * kSize, slot = k * kWarp + lane;
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[k][i] = 0.f;
      if (column >= n) continue;
      float residual[kSize], part[kVector<X>];
#pragma unroll
      for (int v = 0; v < kXVectors; ++v) {
        unpack<X>(sums[slot * kXVectors + v], part);
#pragma unroll
        for (int i = 0; i < kVector<X>; ++i) residual[v * kVector<X> + i] = part[i];
      }
      unpack<Y>(branch[slot], values[k]);
      add_residual<Y, true>(a, seed, base, column, n, residual, values[k]);
#pragma unroll
      for (int v = 0; v < kXVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector<X>; ++i) part[i] = values[k][v * kVector<X> + i];
        const uint4 rounded = pack<X>(part);
        sums[slot * kXVectors + v] = rounded;
        unpack<X>(rounded, part);
#pragma unroll
        for (int i = 0; i < kVector<X>; ++i) values[k][v * kVector<X> + i] = part[i];
      }
    }
    send_part(static_cast<X*>(a.sum) + base + from, sums, elements * int(sizeof(X)));
    Moments whole = moments_of(
        values, float(elements), inverse, a.centred, [&](int k) { return start + k * kWarp * kSize < n; },
        [](auto value) { return sum_over_warp(value); });
    if (!alone) {
      meeting.publish(turn, whole);
      whole = combine(meeting.await(turn), meeting.count(), float(n), a.centred);
    }
    const float rstd = rstd_of<X>(whole.squares, inverse_n, a.eps);
    if (from == 0 && lane == 0) keep_statistics(a, row, whole.mean, rstd);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int column = start + k * kWarp * kSize;
      if (column >= n) continue;
      normalize<Y, true>(a, column, n, whole.mean, rstd, values[k]);
      branch[k * kWarp + lane] = pack<Y>(values[k]);
    }
    send_part(static_cast<Y*>(a.y) + base + from, branch, elements * int(sizeof(Y)));
    if (lane == 0 && turn > 0) {  // the row before has left once all but what this one sent is read
      asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
      fetch(row + (stages - 1) * apart, stage == 0 ? stages - 1 : stage - 1);
    }
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  if (lane == 0) wait_for_copies_out();
#endif
}

// ---- launcher ----

template <class X, class Y>
int launch_added(NormForward a, const NormForwardPlan& plan, const NormCall& call) {
  const auto kernel = norm_forward_added<X, Y>;
  int count = 0;
  if (const int error = grant(kernel, plan.shape, call, count)) return error;
  a.cluster = plan.shape.cluster;
  LaunchShape shape = plan.shape;
  shape.grid = norm_forward_plans::blocks_of_added(plan.turns_of_all, count) * a.cluster;
  return launch(kernel, AddedNorm{a, plan.stages}, shape, call.device, call.stream);
}

int launch_norm_added(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  return call.y_dtype == FUSELINE_FLOAT16 ? launch_added<float, __half>(a, plan, call)
                                          : launch_added<float, __nv_bfloat16>(a, plan, call);
}

}  // namespace fuseline
