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
  int pieces, past;  // of a warp's rings
  // Places in shared memory behind the rings, in bytes.
  int past_at, states_at, weights_at, x_bias_at;
};

// kSumsOfXBias: 0 for none, 1 in registers, 2 in shared memory. kDropsRows: grad_dropped is written. kShiftedRows: rows stand
// at any address, and a lane has every kWarp-th column of a piece.
template <class Type, bool kCentredRows, int kSumsOfXBias, bool kDropsRows, bool kShiftedRows, int kSlotsTogether>
struct PiecesKind {
  using T = Type;
  using X = Type;
  using Y = Type;
  static constexpr int kSize = kVector<T>, kSlots = kPieceColumns / kSize, kXBias = kSumsOfXBias;
  static constexpr bool kCentred = kCentredRows, kDrops = kDropsRows, kShifted = kShiftedRows;
  static constexpr int kTogether = kSlotsTogether;  // slots of a piece
  static constexpr int kPiece = kTogether * kWarp * 16 + (kShifted ? 16 : 0);  // bytes of a tensor
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
  const int from = (rank * warps + warp) * kStep * kSlots, start = from + lane * (kShifted ? 1 : kSize);
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

  // One lane sends for piece number `piece` of `row`, or of rows after it.
  const auto fetch = [&](int row, int piece, int stage) {
    make_ready(piece);  // what follows is made anew, rather than kept for each piece
    row += piece / kPieces * blocks, piece %= kPieces;
    if (row >= rows) return;
    const int column = from + piece * kColumns, bytes = max(0, min(kColumns, n - column)) * int(sizeof(T));
    uint64_t* const barrier = &barriers.arrived[stage][warp];
    unsigned char* const to = ring + place(stage);
    const int64_t at = row * a.n + column;
    const Span<T, kShifted> x(a.x, at, bytes), grad_y(a.grad_y, at, bytes);
    barrier_expect(barrier, x.bytes + grad_y.bytes);
    if (bytes == 0) return;
    copy_in(to, x.first, x.bytes, barrier);
    copy_in(to + Kind::kPiece, grad_y.first, grad_y.bytes, barrier);
  };
  const auto fetch_past = [&](int row, int piece, int stage) {
    make_ready(piece);
    row += piece / kPieces * blocks, piece %= kPieces;
    if (row >= rows) return;
    const int column = from + piece * kColumns, bytes = max(0, min(kColumns, n - column)) * int(sizeof(T));
    uint64_t* const barrier = &barriers.past_arrived[stage][warp];
    const Span<T, kShifted> span(a.grad_sum, row * a.n + column, bytes);
    barrier_expect(barrier, span.bytes);
    if (bytes > 0) copy_in(ring + past_place(stage), span.first, span.bytes, barrier);
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
      weights().keep_apart(a, k, start + k * kStep);
    } else {
      weights().keep(a, k, start + k * kStep);
    }
  }
  // A lane's elements of a piece, and of shifted rows something beyond these; `head`: how far into its first vector it begins.
  const auto take = [&](const unsigned char* part, int head, float (&values)[kSize]) {
    if constexpr (kShifted) {
      const T* const elements = reinterpret_cast<const T*>(part) + head + lane;
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = to_float(elements[i * kWarp]);
    } else {
      take_slot<T, kSize, false>(part, lane).values(0, values);
    }
  };
  const auto put = [&](T* row_of, int column, bool whole, const float (&values)[kSize]) {
    if constexpr (kShifted) {
      T* const to = row_of + column;
      if (whole) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) to[i * kWarp] = from_float<T>(values[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (column + i * kWarp < n) to[i * kWarp] = from_float<T>(values[i]);
        }
      }
    } else {
      store_slot<T, kSize, false>(row_of, column, n, kWarp, values);
    }
  };
  // A piece's head is the same for all that a warp has of a row.
  const auto head_of = [&](const void* tensor, int64_t row_at) {
    return kShifted ? elements_into_vector(static_cast<const T*>(tensor) + row_at * a.n + from) : 0;
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
  for (int turn = 0; row < rows; ++turn, row += blocks) {
    RowTerms terms;
    int at = row;
    forget(at);  // that all lanes have it: a load known to be the same for all is waited for where it stands
    terms.mean = kCentred ? a.mean[at] : 0.f, terms.rstd = a.rstd[at];  // while pieces are on their way
    float sum = 0.f, product_sum = 0.f;
    int stage = first_stage, parity = first_parity;
    const int x_head = head_of(a.x, at), grad_head = head_of(a.grad_y, at);
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const unsigned char* const part = ring + place(stage) + k % kTogether * kWarp * 16;
      int column = start;
      make_ready(column);
      column += k * kStep;
      float weight[kSize];
      weights().take(k, weight);
      if (k % kTogether == 0) barrier_wait(&barriers.arrived[stage][warp], parity);
      if (kShifted ? from + k * kStep < n : column < n) {
        float values[kSize], grad[kSize];
        take(part, x_head, values);
        take(part + Kind::kPiece, grad_head, grad);
        if (kShifted && from + (k + 1) * kStep > n) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (column + i * kWarp >= n) values[i] = grad[i] = 0.f;
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
    const int past_head = past ? head_of(a.grad_sum, row) : 0;
    // Of shifted rows the mask is made for the fours of elements that a piece stands in, and its bits go round the warp.
    const int64_t masks_from = (base + from) / 4 * 4;
    const int mask_head = int((base + from) % 4);
    const auto masks_of = [&](int k) {
      return kept_of_slots<kSize, 1>(a.dropout, barriers.seed, masks_from + k * kStep + lane * kSize, 0);
    };
    [[maybe_unused]] uint32_t masks = Kind::kDrops && kShifted && wants_rows && a.dropout.seed ? masks_of(0) : 0;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const unsigned char* const part = ring + place(stage) + k % kTogether * kWarp * 16;
      if (past && k % kTogether == 0) barrier_wait(&barriers.past_arrived[past_stage][warp], past_parity);
      int column = start;
      make_ready(column);
      column += k * kStep;
      [[maybe_unused]] uint32_t kept = 0;
      if constexpr (Kind::kDrops && kShifted) {
        if (wants_rows && a.dropout.seed) {
          const uint32_t next = masks_of(k + 1), beyond = __shfl_sync(kAllLanes, next, 0);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const int at_bit = mask_head + i * kWarp + lane;
            const uint32_t of_lane = __shfl_sync(kAllLanes, masks, at_bit / kSize);
            kept |= ((at_bit < kWarp * kSize ? of_lane : beyond) >> (at_bit % kSize) & 1) << i;
          }
          masks = next;
        }
      }
      const bool whole = from + (k + 1) * kStep <= n;
      if (wants_rows && (kShifted ? from + k * kStep < n : column < n)) {
        if constexpr (Kind::kDrops && !kShifted) {
          if (a.dropout.seed) kept = kept_of_slots<kSize, 1>(a.dropout, barriers.seed, base + column, 0);
        }
        float values[kSize], grad[kSize], weight[kSize];
        weights().take(k, weight);
        take(part, x_head, values);
        take(part + Kind::kPiece, grad_head, grad);
        second_pass<kSize, kCentred>(values, weight, terms, grad);
        if (past) {
          take(ring + past_place(past_stage) + k % kTogether * kWarp * 16, past_head, values);
#pragma unroll
          for (int i = 0; i < kSize; ++i) grad[i] += values[i];
        }
        if (a.grad_x) put(static_cast<T*>(a.grad_x) + base, column, whole, grad);
        if constexpr (Kind::kDrops) {
          if (a.dropout.seed) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[i] *= kept >> i & 1 ? a.dropout.scale : 0.f;
          }
          if (a.grad_dropped) put(static_cast<T*>(a.grad_dropped) + base, column, whole, grad);
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
          const int c = start + k * kStep + i * kWarp;
          if (c < n) sums[c] = column(k, i);
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
