// The norms' backward for short rows of whole vectors (sm_90): several neighbours of them come to shared memory and leave it in
// bulk copies, and in between a thread takes vectors.
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth, if instructions are few: 48 an element with a mask, 14 of them the
// mask's (80 read 0.89 of the copy bandwidth, these 0.925). So a warp's place is known to be that of all its lanes, masks are
// made while a tile is on its way, and nothing is asked of each element: columns beside a row have weights of zero in its
// sums, rows beside the last are zeros.
//
// Threads: 1 to 32 share a row, a warp has several rows beside each other, and kTileTurns times as many are its tile. Each
// warp has a ring of tiles of its own: some are on their way while one is computed in place and the one before leaves.
#pragma once

#include "kept.cuh"
#include "norm_backward_ring_parts.cuh"

namespace fuseline {

using norm_backward_plans::kMostTileStages;
using norm_backward_plans::kTileTurns;

template <class XType, class YType, int kSumsOfColumn, bool kCentredRows>
struct TileKind {
  using X = XType;
  using Y = YType;
  static constexpr int kSlots = 1, kSums = kSumsOfColumn, kSize = kVector<Y>;
  static constexpr bool kOneWarp = true, kCentred = kCentredRows, kAdded = kSumsOfColumn == kSumsOfAddedNorm;
  static constexpr int kThreads = norm_backward_plans::tile_threads(kAdded);

  // Bytes of a tile: whole vectors of each tensor.
  static __host__ __device__ constexpr int stage(int elements) {
    return elements * int(sizeof(X) * (kAdded ? 2 : 1) + sizeof(Y));
  }
};

// A thread's elements of a row from a tile.
template <class T, int kSize>
__device__ __forceinline__ void take_elements(const unsigned char* tile, int at, float (&values)[kSize]) {
  take_slot<T, kSize>(reinterpret_cast<const unsigned char*>(reinterpret_cast<const T*>(tile) + at), 0).values(values);
}

// And to it; `inside`: how many of them are the row's, or none.
template <class T, int kSize>
__device__ __forceinline__ void put_elements(unsigned char* tile, int at, int inside, const float (&values)[kSize]) {
  if (inside > 0) store_slot<T, kSize>(reinterpret_cast<T*>(tile) + at, 0, kSize, values);
}

template <class Kind>
__global__ void __launch_bounds__(Kind::kThreads, 1) norm_backward_tiled(const NormBackward a) {
#if __CUDA_ARCH__ >= 900
  using X = typename Kind::X;
  using Y = typename Kind::Y;
  constexpr int kSize = Kind::kSize, kSums = Kind::kSums;
  constexpr bool kAdded = Kind::kAdded, kCentred = Kind::kCentred;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kMostTileStages][Kind::kThreads / kWarp];

  const int n = int(a.n), stages = a.stages, threads = blockDim.x, beside = kWarp / threads;
  const int thread = int(threadIdx.y) * threads + int(threadIdx.x), lane = thread % kWarp;
  const int warp = of_warp(thread / kWarp), warps = threads * int(blockDim.y) / kWarp;
  const int aside = lane / threads, first = int(threadIdx.x) * kSize;  // column
  const int inside = n - first;
  const bool sends = lane == 0;
  const int rows_of_tile = kTileTurns * beside, turn = beside * n, full = kTileTurns * turn;  // the latter in elements
  const int at = aside * n + (inside <= 0 ? 0 : first);  // beside a row: of this row, too
  const int tiles = int((a.rows + rows_of_tile - 1) / rows_of_tile), step = int(gridDim.x) * warps;
  const bool centred = kCentred && (!kAdded || a.mean), wants_rows = a.wants_rows();
  const bool adds = kAdded && a.grad_sum, masks = kAdded && a.dropout.seed;
  const int stage_bytes = Kind::stage(full), grad_y_at = full * int(sizeof(X));
  const int grad_sum_at = grad_y_at + full * int(sizeof(Y));
  const auto stage_at = [&](int stage) { return ring + (stage * warps + warp) * stage_bytes; };
  const auto count_of = [&](int tile) {
    return int(min(a.rows - int64_t(tile) * rows_of_tile, int64_t(rows_of_tile))) * n;
  };

  const auto fetch = [&](int tile, int stage) {
    if (tile >= tiles) return;
    const int64_t base = int64_t(tile) * full;
    const int count = count_of(tile);
    const X* const x = static_cast<const X*>(a.x) + base;
    const Y* const grad_y = static_cast<const Y*>(a.grad_y) + base;
    const X* const grad_sum = adds ? static_cast<const X*>(a.grad_sum) + base : nullptr;
    unsigned char* const to = stage_at(stage);
    uint64_t* const barrier = &arrived[stage][warp];
    const int x_bytes = count * int(sizeof(X)), grad_bytes = count * int(sizeof(Y));
    barrier_expect(barrier, (adds ? 2 : 1) * x_bytes + grad_bytes);
    copy_in(to, x, x_bytes, barrier);
    copy_in(to + grad_y_at, grad_y, grad_bytes, barrier);
    if (adds) copy_in(to + grad_sum_at, grad_sum, x_bytes, barrier);
  };
  const auto send = [&](auto* to, const unsigned char* tile, int count) {
    const auto* const from = reinterpret_cast<decltype(to)>(const_cast<unsigned char*>(tile));
    copy_out(to, from, count * int(sizeof(*to)));
  };

  int tile = int(blockIdx.x) * warps + warp;
  let_next_start();
  wait_for_earlier();
  const uint64_t seed = masks ? uint64_t(*a.dropout.seed) : 0;
  if (sends) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) barrier_init(&arrived[stage][warp], 1);
    publish_barriers();
#pragma unroll 1
    for (int stage = 0; stage < stages - 1; ++stage) fetch(tile + stage * step, stage);
  }
  __syncthreads();

  float weight[kSize];
  weights_of_columns<Y, true>(a, first, weight);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (inside <= 0) weight[i] = 0.f;
  }
  ColumnSums<kSize, kSums> columns[1] = {};
  float mean[kTileTurns], rstd[kTileTurns], next_mean[kTileTurns], next_rstd[kTileTurns];
  const auto statistics = [&](int of, float (&means)[kTileTurns], float (&rstds)[kTileTurns]) {
    const int64_t row = min(int64_t(of) * rows_of_tile, a.rows - 1);
    const int last = int(min(a.rows - 1 - row, int64_t(rows_of_tile - 1)));
#pragma unroll
    for (int r = 0; r < kTileTurns; ++r) {
      const int of_tile = min(r * beside + aside, last);
      means[r] = centred ? a.mean[row + of_tile] : 0.f;
      rstds[r] = a.rstd[row + of_tile];
    }
  };
  statistics(tile, mean, rstd);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (; tile < tiles; tile += step) {
    statistics(tile + step, next_mean, next_rstd);
    unsigned char* const parts = stage_at(stage);
    const int64_t base = int64_t(tile) * full;
    const int count = count_of(tile);
    [[maybe_unused]] uint32_t kept = 0;
    if constexpr (kAdded) {  // while the tile is on its way
      if (masks) kept = kept_of_slots<kSize, kTileTurns>(a.dropout, seed, base + at, turn);
    }
    if (sends) {  // the tile before has left: its place takes another
      wait_for_copies_out();
      fetch(tile + (stages - 1) * step, stage == 0 ? stages - 1 : stage - 1);
    }
    __syncwarp();
    barrier_wait(&arrived[stage][warp], parity);
    if (count < full) {
      for (int i = count + lane; i < full; i += kWarp) {
        reinterpret_cast<X*>(parts)[i] = from_float<X>(0.f);
        reinterpret_cast<Y*>(parts + grad_y_at)[i] = from_float<Y>(0.f);
        if (adds) reinterpret_cast<X*>(parts + grad_sum_at)[i] = from_float<X>(0.f);
      }
      __syncwarp();
    }
    constexpr int kTogether = 2;  // rows
#pragma unroll
    for (int pair = 0; pair < kTileTurns; pair += kTogether) {
      float values[kTogether][kSize], grad[kTogether][kSize], sums[2 * kTogether] = {};
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const int place = (pair + r) * turn + at;
        take_elements<X>(parts, place, values[r]);
        take_elements<Y>(parts + grad_y_at, place, grad[r]);
        first_pass<kSize, kSums, kCentred>(values[r], grad[r], weight, mean[pair + r], rstd[pair + r], columns[0],
                                           sums[2 * r], sums[2 * r + 1]);
      }
      if (!wants_rows) continue;
      sum_in_warp(sums, threads);
      __syncwarp();  // all have taken what another's results are put over
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const int place = (pair + r) * turn + at;
        RowTerms terms;
        terms.mean = mean[pair + r], terms.rstd = rstd[pair + r];
        terms.set(a, centred, sums[2 * r], sums[2 * r + 1]);
        second_pass<kSize, kCentred>(values[r], weight, terms, grad[r]);
        if (adds) {
          take_elements<X>(parts + grad_sum_at, place, values[r]);
#pragma unroll
          for (int i = 0; i < kSize; ++i) grad[r][i] += values[r][i];
        }
        put_elements<X>(parts, place, inside, grad[r]);
        if constexpr (kAdded) {
          if (masks) {
            const uint32_t bits = kept >> ((pair + r) * kSize);
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[r][i] *= bits >> i & 1 ? a.dropout.scale : 0.f;
          }
#pragma unroll
          for (int i = 0; i < kSize; ++i) columns[0].x_bias[i] += grad[r][i];
          if (a.grad_dropped) put_elements<Y>(parts + grad_y_at, place, inside, grad[r]);
        }
      }
    }
    if (wants_rows) show_to_copies();
    __syncwarp();
    if (sends) {
      if (a.grad_x && wants_rows) send(static_cast<X*>(a.grad_x) + base, parts, count);
      if (kAdded && a.grad_dropped) send(static_cast<Y*>(a.grad_dropped) + base, parts + grad_y_at, count);
    }
    if (++stage == stages) stage = 0, parity ^= 1;
#pragma unroll
    for (int r = 0; r < kTileTurns; ++r) mean[r] = next_mean[r], rstd[r] = next_rstd[r];
  }
  if (sends) wait_for_copies_out();
  if (!a.partials) return;
  __syncthreads();  // the rings are done with
  write_partials<Kind>(a, columns, reinterpret_cast<float*>(ring), int(blockIdx.x));
#endif
}

}  // namespace fuseline
