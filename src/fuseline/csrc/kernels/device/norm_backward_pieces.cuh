// The norms' backward for rows of which no block's shared memory holds two beside the weights (sm_90): a ring of pieces of rows.
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth. Threads: a cluster of kPiecesBlocks has a row at a time and stays; each
// warp has neighbouring columns, kSlots vectors a lane, and rings of its own, one of pieces of x and grad_y, one of pieces of
// grad_sum, which is wanted later. A piece is a slot of each lane: as soon as the second pass is through with one, its place
// takes the next that is not on its way, so that memory is busy while a row meets and while it is written. Weights are in
// shared memory: read again for each row they cost 0.21 of the copy bandwidth, in layer norms of fp32.
//
// Sums over rows are in registers, those of a third kind in shared memory.
#pragma once

#include "kept.cuh"
#include "meeting.cuh"
#include "norm_backward_ring_parts.cuh"

namespace fuseline {

constexpr int kPiecesBlocks = kMostBlocks;  // of a row: at least two, as a block alone may send no state to itself
constexpr int kPiecesThreads = 512, kPiecesWarps = kPiecesThreads / kWarp;
constexpr int kPieceBytes = kWarp * 16;   // of a tensor
constexpr int kMostPiecesAhead = 16, kMostPastAhead = 8;
constexpr int kPieceColumns = 32;         // of a thread

struct PiecesNorm {
  NormBackward norm;
  int pieces, past;  // of a warp's rings
  // Places in shared memory behind the rings, in bytes.
  int past_at, states_at, weights_at, x_bias_at;
};

// kSumsOfXBias, with which grad_dropped is written: 0 for none, 1 in registers, 2 in shared memory.
template <class Type, bool kCentredRows, int kSumsOfXBias>
struct PiecesKind {
  using T = Type;
  using X = Type;
  using Y = Type;
  static constexpr int kSize = kVector<T>, kSlots = kPieceColumns / kSize, kXBias = kSumsOfXBias;
  static constexpr bool kCentred = kCentredRows, kShifted = false;
  static constexpr int kSums = kCentred ? 2 : 1;  // of weight and bias
};

struct PiecesStatics {
  uint64_t arrived[kMostPiecesAhead][kPiecesWarps], past_arrived[kMostPastAhead][kPiecesWarps], met[2];
  uint64_t seed;
};

template <class Kind>
__global__ void __launch_bounds__(kPiecesThreads, 1) norm_backward_pieces(const PiecesNorm given) {
#if __CUDA_ARCH__ >= 900
  using T = typename Kind::T;
  constexpr int kSize = Kind::kSize, kSlots = Kind::kSlots, kSums = Kind::kSums;
  constexpr bool kCentred = Kind::kCentred;
  constexpr int kStep = kWarp * kSize;  // columns of a piece
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ PiecesStatics barriers;

  const NormBackward& a = given.norm;
  const int n = int(a.n), rows = int(a.rows), pieces = given.pieces, past_pieces = given.past;
  const int lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp), warps = int(blockDim.x) / kWarp;
  const int rank = int(blockIdx.x) % kPiecesBlocks;
  const int block = int(blockIdx.x) / kPiecesBlocks, blocks = int(gridDim.x) / kPiecesBlocks;  // a cluster counts once
  const int from = (rank * warps + warp) * kStep * kSlots, start = from + lane * kSize;
  const bool wants_rows = a.wants_rows(), past = past_pieces > 0;

  // Places in the ring, in bytes.
  const auto place = [&](int stage) { return (warp * pieces + stage) * (2 * kPieceBytes); };
  const auto past_place = [&](int stage) {
    return given.past_at + (warp * past_pieces + stage) * kPieceBytes;
  };
  const bool wide_weights = (a.weight && a.fp32_weights) || sizeof(T) == 4;
  const auto weights = [&] {
    const int of_warp = kPieceColumns / (wide_weights ? 4 : 8) * kWarp;
    return RingWeights<Kind, kWarp>{reinterpret_cast<uint4*>(ring + given.weights_at) + warp * of_warp + lane, wide_weights};
  };
  const auto x_bias_sums = [&](int i) -> float4& {
    return reinterpret_cast<float4*>(ring + given.x_bias_at)[(warp * (kPieceColumns / 4) + i) * kWarp + lane];
  };

  // One lane sends for slot number `slot` of `row`, or of rows after it.
  const auto fetch = [&](int row, int slot, int stage) {
    make_ready(slot);  // what follows is made anew, rather than kept for each slot
    row += slot / kSlots * blocks, slot %= kSlots;
    if (row >= rows) return;
    const int column = from + slot * kStep, bytes = max(0, min(kStep, n - column)) * int(sizeof(T));
    uint64_t* const barrier = &barriers.arrived[stage][warp];
    unsigned char* const to = ring + place(stage);
    barrier_expect(barrier, 2 * bytes);
    if (bytes == 0) return;
    const int64_t at = row * a.n + column;
    copy_in(to, static_cast<const T*>(a.x) + at, bytes, barrier);
    copy_in(to + kPieceBytes, static_cast<const T*>(a.grad_y) + at, bytes, barrier);
  };
  const auto fetch_past = [&](int row, int slot, int stage) {
    make_ready(slot);
    row += slot / kSlots * blocks, slot %= kSlots;
    if (row >= rows) return;
    const int column = from + slot * kStep, bytes = max(0, min(kStep, n - column)) * int(sizeof(T));
    uint64_t* const barrier = &barriers.past_arrived[stage][warp];
    barrier_expect(barrier, bytes);
    const T* const at = static_cast<const T*>(a.grad_sum) + (row * a.n + column);
    if (bytes > 0) copy_in(ring + past_place(stage), at, bytes, barrier);
  };

  let_next_start();
  // By loops of one thread: of a predicated `mbarrier.init` racecheck takes every thread's register for an address.
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < pieces; ++stage) barrier_init(&barriers.arrived[stage][warp], 1);
#pragma unroll 1
    for (int stage = 0; stage < past_pieces; ++stage) barrier_init(&barriers.past_arrived[stage][warp], 1);
  }
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int meeting = 0; meeting < 2; ++meeting) barrier_init(&barriers.met[meeting], 1);
  }
  publish_barriers();
  cluster_arrive_relaxed();
  __syncwarp();
  wait_for_earlier();
  if (Kind::kXBias > 0 && a.dropout.seed && threadIdx.x == 0) barriers.seed = uint64_t(*a.dropout.seed);
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < pieces; ++stage) fetch(block, stage, stage);
#pragma unroll 1
    for (int stage = 0; stage < past_pieces; ++stage) fetch_past(block, stage, stage);
  }
#pragma unroll
  for (int k = 0; k < kSlots; ++k) weights().keep(a, k, start + k * kStep);
  if constexpr (Kind::kXBias == 2) {
    for (int i = 0; i < kPieceColumns / 4; ++i) x_bias_sums(i) = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  cluster_wait();   // the others' barriers are there
  __syncthreads();  // and the seed; weights are each thread's own

  ColumnSums<kSize, kSums> columns[kSlots] = {};
  float x_bias_columns[Kind::kXBias == 1 ? kSlots : 1][kSize] = {};
  int first_stage = 0, first_parity = 0, past_stage = 0, past_parity = 0;
  int row = block;
#pragma unroll 1
  for (int turn = 0; row < rows; ++turn, row += blocks) {
    RowTerms terms;
    int at = row;
    forget(at);  // that all lanes have it: a load known to be the same for all is waited for where it stands
    terms.mean = kCentred ? a.mean[at] : 0.f, terms.rstd = a.rstd[at];  // while pieces are on their way
    float sum = 0.f, product_sum = 0.f;
    int stage = first_stage, parity = first_parity;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const unsigned char* const part = ring + place(stage);
      int column = start;
      make_ready(column);
      column += k * kStep;
      float weight[kSize];
      weights().take(k, weight);
      barrier_wait(&barriers.arrived[stage][warp], parity);
      if (column < n) {
        float values[kSize], grad[kSize];
        take_slot<T, kSize, false>(part, lane).values(0, values);
        take_slot<T, kSize, false>(part + kPieceBytes, lane).values(0, grad);
        first_pass<kSize, kSums, kCentred>(values, grad, weight, terms.mean, terms.rstd, columns[k], sum, product_sum);
      }
      if (++stage == pieces) stage = 0, parity ^= 1;
    }
    if (wants_rows) {
      float2 sums = sum_over_warp(make_float2(sum, product_sum));
      int count = warps;  // of the row
      make_ready(count);
      count *= kPiecesBlocks;
      float2* const here = reinterpret_cast<float2*>(ring + given.states_at) + (turn & 1) * count;
      uint64_t* const met = &barriers.met[turn & 1];
      if (threadIdx.x == 0) barrier_expect(met, count * int(sizeof(float2)));
      if (lane < kPiecesBlocks) send_in_cluster(here + rank * warps + warp, met, lane, sums);
      barrier_wait(met, turn >> 1 & 1);
      sums = make_float2(0.f, 0.f);
#pragma unroll 1
      for (int i = lane; i < count; i += kWarp) sums = plus(sums, here[i]);
      sums = sum_over_warp(sums);
      terms.set(a, kCentred, sums.x, sums.y);
    }
    int64_t base = row * a.n;
    forget(base);  // kept, rather than multiplied anew for each store
    stage = first_stage;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const unsigned char* const part = ring + place(stage);
      if (past) barrier_wait(&barriers.past_arrived[past_stage][warp], past_parity);
      int column = start;
      make_ready(column);
      column += k * kStep;
      if (wants_rows && column < n) {
        [[maybe_unused]] uint32_t kept = 0;
        if constexpr (Kind::kXBias > 0) {
          if (a.dropout.seed) kept = kept_of_slots<kSize, 1>(a.dropout, barriers.seed, base + column, 0);
        }
        float values[kSize], grad[kSize], weight[kSize];
        weights().take(k, weight);
        take_slot<T, kSize, false>(part, lane).values(0, values);
        take_slot<T, kSize, false>(part + kPieceBytes, lane).values(0, grad);
        second_pass<kSize, kCentred>(values, weight, terms, grad);
        if (past) {
          take_slot<T, kSize, false>(ring + past_place(past_stage), lane).values(0, values);
#pragma unroll
          for (int i = 0; i < kSize; ++i) grad[i] += values[i];
        }
        if (a.grad_x) store_slot<T, kSize, false>(static_cast<T*>(a.grad_x) + base, column, n, kWarp, grad);
        if constexpr (Kind::kXBias > 0) {
          if (a.dropout.seed) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] *= kept >> i & 1 ? a.dropout.scale : 0.f;
          }
          if (a.grad_dropped) {
            store_slot<T, kSize, false>(static_cast<T*>(a.grad_dropped) + base, column, n, kWarp, grad);
          }
        }
        if constexpr (Kind::kXBias == 1) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) x_bias_columns[k][i] += grad[i];
        }
        if constexpr (Kind::kXBias == 2) {
#pragma unroll
          for (int i = 0; i < kSize; i += 4) {
            float4& sums = x_bias_sums((k * kSize + i) / 4);
            sums = make_float4(sums.x + grad[i], sums.y + grad[i + 1], sums.z + grad[i + 2], sums.w + grad[i + 3]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        fetch(row, k + pieces, stage);
        if (past) fetch_past(row, k + past_pieces, past_stage);
      }
      if (++stage == pieces) stage = 0, first_parity ^= 1;
      if (++past_stage == past_pieces) past_stage = 0, past_parity ^= 1;
    }
    first_stage = stage;
  }
  if (!a.partials) return;
  float* const sums_of_block = a.partials + int64_t(block) * a.columns;
  const int64_t kind_step = int64_t(blocks) * a.columns;
  const auto write = [&](int kind, auto&& column) {
    write_columns<kSize, kStep, kSlots>(sums_of_block + kind * kind_step, static_cast<float*>(nullptr), start, n, column);
  };
  write(0, [&](int k, int i) { return columns[k].weight[i]; });
  if constexpr (kSums > 1) write(1, [&](int k, int i) { return columns[k].bias[i]; });
  if constexpr (Kind::kXBias == 1) write(2, [&](int k, int i) { return x_bias_columns[k][i]; });
  if constexpr (Kind::kXBias == 2) {
    write(2, [&](int k, int i) {
      const float4& four = x_bias_sums((k * kSize + i) / 4);
      return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
    });
  }
#endif
}

}  // namespace fuseline
