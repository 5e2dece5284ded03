// The norms' backward for rows of which no block's shared memory holds two beside the weights (sm_90): a ring of pieces of rows.
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth. Threads: a cluster has a row at a time and stays; each
// warp has neighbouring columns, kSlots vectors a lane, and rings of its own, one of pieces of x and grad_y, one of pieces of
// grad_sum, which is wanted later. A piece is a slot or two of each lane: as soon as the second pass is through with one, its place
// takes the next that is not on its way, so that memory is busy while a row meets and while it is written. Weights are in
// shared memory: read again for each row they cost 0.21 of the copy bandwidth, in layer norms of fp32.
//
// Sums over rows are in registers, those of a third kind in shared memory.
#pragma once

#include "kept.cuh"
#include "meeting.cuh"
#include "norm_backward_ring_parts.cuh"

namespace fuseline {

constexpr int kPiecesThreads = 512, kPiecesWarps = kPiecesThreads / kWarp;
constexpr int kMostPiecesAhead = 16, kMostPastAhead = 8;
constexpr int kPieceColumns = 32;         // of a thread

struct PiecesNorm {
  NormBackward norm;
  int classes;       // of rows, by how far into a vector they begin; the rows of one are as many apart
  int pieces, past;  // of a warp's rings
  // Places in shared memory behind the rings, in bytes.
  int past_at, states_at, weights_at, x_bias_at;
};

// kSumsOfXBias: 0 for none, 1 in registers, 2 in shared memory. kDropsRows: grad_dropped is written. kShiftedRows: rows begin
// anywhere in a vector, in all tensors alike: a cluster has only rows that begin as far into one, so that what it has of them, of
// weights and of sums over rows keeps its lanes.
template <class Type, bool kCentredRows, int kSumsOfXBias, bool kDropsRows, bool kShiftedRows, int kSlotsTogether>
struct PiecesKind {
  using T = Type;
  using X = Type;
  using Y = Type;
  static constexpr int kSize = kVector<T>, kSlots = kPieceColumns / kSize, kXBias = kSumsOfXBias;
  static constexpr bool kCentred = kCentredRows, kDrops = kDropsRows, kShifted = kShiftedRows;
  static constexpr int kTogether = kSlotsTogether;  // slots of a piece
  static constexpr int kPiece = kTogether * kWarp * 16;  // bytes of a tensor
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
  constexpr bool kCentred = Kind::kCentred, kShifted = Kind::kShifted;
  constexpr int kStep = kWarp * kSize, kTogether = Kind::kTogether;  // columns of a slot, and slots of a piece
  constexpr int kPieces = kSlots / kTogether, kColumns = kTogether * kStep;  // of a row that a warp has, and of these
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ PiecesStatics barriers;

  const NormBackward& a = given.norm;
  const int n = int(a.n), rows = int(a.rows), pieces = given.pieces, past_pieces = given.past;
  const int lane = int(threadIdx.x) % kWarp, warp = of_warp(int(threadIdx.x) / kWarp), warps = int(blockDim.x) / kWarp;
  const int cluster = a.cluster, rank = int(blockIdx.x) & (cluster - 1);
  const int block = int(blockIdx.x) / cluster, blocks = int(gridDim.x) / cluster;  // a cluster counts once
  // From a row to the next of this cluster's: clusters with rows of one class take turns.
  const int of_class = kShifted ? (blocks - block % given.classes + given.classes - 1) / given.classes : blocks;
  const int stride = kShifted ? of_class * given.classes : blocks;
  // Elements before a row in its first vector, which count as columns.
  const int head = kShifted ? elements_into_vector(static_cast<const T*>(a.x) + int64_t(block) * a.n) : 0;
  const int from = (rank * warps + warp) * kStep * kSlots - head, start = from + lane * kSize;
  const bool wants_rows = a.wants_rows(), past = past_pieces > 0;

  // Places in the ring, in bytes.
  const auto place = [&](int stage) { return (warp * pieces + stage) * (2 * Kind::kPiece); };
  const auto past_place = [&](int stage) {
    return given.past_at + (warp * past_pieces + stage) * Kind::kPiece;
  };
  const bool wide_weights = (a.weight && a.fp32_weights) || sizeof(T) == 4;
  const auto weights = [&] {
    const int of_warp = kPieceColumns / (wide_weights ? 4 : 8) * kWarp;
    return RingWeights<Kind, kWarp>{reinterpret_cast<uint4*>(ring + given.weights_at) + warp * of_warp + lane, wide_weights};
  };
  const auto x_bias_sums = [&](int i) -> float4& {
    return reinterpret_cast<float4*>(ring + given.x_bias_at)[(warp * (kPieceColumns / 4) + i) * kWarp + lane];
  };

  // Of a piece's columns, in whole vectors: those at the ends of a row bring elements of its neighbours along.
  const auto bytes_from = [&](int column) {
    return (max(0, min(kColumns, n - column)) * int(sizeof(T)) + (kShifted ? 15 : 0)) / 16 * 16;
  };
  // One lane sends for piece number `piece` of `row`, or of rows after it.
  const auto fetch = [&](int row, int piece, int stage) {
    make_ready(piece);  // what follows is made anew, rather than kept for each piece
    row += piece / kPieces * stride, piece %= kPieces;
    if (row >= rows) return;
    const int column = from + piece * kColumns, bytes = bytes_from(column);
    uint64_t* const barrier = &barriers.arrived[stage][warp];
    unsigned char* const to = ring + place(stage);
    const int64_t at = row * a.n + column;
    barrier_expect(barrier, 2 * bytes);
    if (bytes == 0) return;
    copy_in(to, static_cast<const T*>(a.x) + at, bytes, barrier);
    copy_in(to + Kind::kPiece, static_cast<const T*>(a.grad_y) + at, bytes, barrier);
  };
  const auto fetch_past = [&](int row, int piece, int stage) {
    make_ready(piece);
    row += piece / kPieces * stride, piece %= kPieces;
    if (row >= rows) return;
    const int column = from + piece * kColumns, bytes = bytes_from(column);
    uint64_t* const barrier = &barriers.past_arrived[stage][warp];
    barrier_expect(barrier, bytes);
    if (bytes > 0) copy_in(ring + past_place(stage), static_cast<const T*>(a.grad_sum) + row * a.n + column, bytes, barrier);
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
  if (Kind::kDrops && a.dropout.seed && threadIdx.x == 0) barriers.seed = uint64_t(*a.dropout.seed);
  if (lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < pieces; ++stage) fetch(block, stage, stage);
#pragma unroll 1
    for (int stage = 0; stage < past_pieces; ++stage) fetch_past(block, stage, stage);
  }
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    if constexpr (kShifted) {
      weights().keep_within(a, k, start + k * kStep);
    } else {
      weights().keep(a, k, start + k * kStep);
    }
  }
  const auto take = [&](const unsigned char* part, float (&values)[kSize]) {
    take_slot<T, kSize, false>(part, lane).values(0, values);
  };
  const auto put = [&](T* row_of, int column, const float (&values)[kSize]) {
    if constexpr (kShifted) {
      store_vector<T, false>(row_of, column, n, true, values);
    } else {
      store_slot<T, kSize, false>(row_of, column, n, kWarp, values);
    }
  };
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
  for (int turn = 0; row < rows; ++turn, row += stride) {
    RowTerms terms;
    int at = row;
    forget(at);  // that all lanes have it: a load known to be the same for all is waited for where it stands
    terms.mean = kCentred ? a.mean[at] : 0.f, terms.rstd = a.rstd[at];  // while pieces are on their way
    float sum = 0.f, product_sum = 0.f;
    int stage = first_stage, parity = first_parity;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const unsigned char* const part = ring + place(stage) + k % kTogether * kWarp * 16;
      int column = start;
      make_ready(column);
      column += k * kStep;
      float weight[kSize];
      weights().take(k, weight);
      if (k % kTogether == 0) barrier_wait(&barriers.arrived[stage][warp], parity);
      if (column < n) {
        float values[kSize], grad[kSize];
        take(part, values);
        take(part + Kind::kPiece, grad);
        if (kShifted && (column < 0 || column + kSize > n)) {  // elements of its neighbours
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (column + i < 0 || column + i >= n) values[i] = grad[i] = 0.f;
          }
        }
        first_pass<kSize, kSums, kCentred>(values, grad, weight, terms.mean, terms.rstd, columns[k], sum, product_sum);
      }
      if ((k + 1) % kTogether == 0 && ++stage == pieces) stage = 0, parity ^= 1;
    }
    if (wants_rows) {
      float2 sums = sum_over_warp(make_float2(sum, product_sum));
      int count = warps;  // of the row
      make_ready(count);
      count *= cluster;
      float2* const here = reinterpret_cast<float2*>(ring + given.states_at) + (turn & 1) * count;
      uint64_t* const met = &barriers.met[turn & 1];
      if (threadIdx.x == 0) barrier_expect(met, count * int(sizeof(float2)));
      if (lane < cluster) send_in_cluster(here + rank * warps + warp, met, lane, sums);
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
      const unsigned char* const part = ring + place(stage) + k % kTogether * kWarp * 16;
      if (past && k % kTogether == 0) barrier_wait(&barriers.past_arrived[past_stage][warp], past_parity);
      int column = start;
      make_ready(column);
      column += k * kStep;
      [[maybe_unused]] uint32_t kept = 0;
      if (wants_rows && column < n) {
        if constexpr (Kind::kDrops) {
          if (a.dropout.seed) kept = kept_of_slots<kSize, 1>(a.dropout, barriers.seed, base + column, 0);
        }
        float values[kSize], grad[kSize], weight[kSize];
        weights().take(k, weight);
        take(part, values);
        take(part + Kind::kPiece, grad);
        second_pass<kSize, kCentred>(values, weight, terms, grad);
        if (past) {
          take(ring + past_place(past_stage) + k % kTogether * kWarp * 16, values);
#pragma unroll
          for (int i = 0; i < kSize; ++i) grad[i] += values[i];
        }
        if (a.grad_x) put(static_cast<T*>(a.grad_x) + base, column, grad);
        if constexpr (Kind::kDrops) {
          if (a.dropout.seed) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] *= kept >> i & 1 ? a.dropout.scale : 0.f;
          }
          if (a.grad_dropped) put(static_cast<T*>(a.grad_dropped) + base, column, grad);
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
      if ((k + 1) % kTogether > 0) continue;
      __syncwarp();
      if (lane == 0) {
        fetch(row, k / kTogether + pieces, stage);
        if (past) fetch_past(row, k / kTogether + past_pieces, past_stage);
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
    float* const sums = sums_of_block + kind * kind_step;
    if constexpr (kShifted) {
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int c = start + k * kStep + i;
          if (c >= 0 && c < n) sums[c] = column(k, i);
        }
      }
    } else {
      write_columns<kSize, kStep, kSlots>(sums, static_cast<float*>(nullptr), start, n, column);
    }
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
