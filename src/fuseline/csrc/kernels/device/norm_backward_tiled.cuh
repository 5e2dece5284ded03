// The norms' backward for short rows (sm_90): several neighbours of them are whole vectors, whatever their length, and come
// to shared memory and leave it in bulk copies. In between a thread takes vectors, or single elements where rows do not
// keep to 16-byte steps.
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth.
//
// Threads: 1 to 32 share a row, a warp has several rows beside each other, and kTileTurns times as many are its tile. Each
// warp has a ring of tiles of its own: some are on their way while one is computed in place and the one before leaves.
#pragma once

#include "norm_backward_rows.cuh"
#include "norm_sums.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kTileTurns = 4;
constexpr int kMostTileStages = 4, kLeastTileStages = 3;
constexpr int kLongestOddRow = 16;  // in threads: eight rows and more are a tile

template <class XType, class YType, int kSumsOfColumn, bool kCentredRows, bool kVectorsOfRow>
struct TileKind {
  using X = XType;
  using Y = YType;
  static constexpr int kSlots = 1, kSums = kSumsOfColumn, kSize = kVector<Y>;
  static constexpr bool kVectors = kVectorsOfRow;  // rows are whole ones
  static constexpr bool kOneWarp = true, kCentred = kCentredRows, kAdded = kSumsOfColumn == kSumsOfAddedNorm;
  static constexpr int kThreads = kAdded ? 384 : 512;

  // Bytes of a tile of one tensor.
  template <class T>
  static __host__ __device__ constexpr int part(int rows, int n) {
    return (rows * n * int(sizeof(T)) + 15) / 16 * 16;
  }
  static __host__ __device__ constexpr int stage(int rows, int n) {
    return part<X>(rows, n) * (kAdded ? 2 : 1) + part<Y>(rows, n);
  }
};

// One lane sends for the first `count` elements of a tile; what fills no vector it brings itself, first.
template <class T>
__device__ __forceinline__ int prepare_tile(T* tile, const T* from, int count) {
  const int whole = count / kVector<T> * kVector<T>;
  for (int i = whole; i < count; ++i) tile[i] = from[i];
  if (whole < count) show_to_copies();
  return whole * int(sizeof(T));
}

// Elements first .. of a row whose `inside` next ones are its own, from and to a tile.
template <class T, bool kVectors, int kSize>
__device__ __forceinline__ void take_elements(const T* at, int inside, float fill, float (&values)[kSize]) {
  if constexpr (kVectors) {
    using Held = HeldSlot<T, kSize, false>;
    Held held;
#pragma unroll
    for (int v = 0; v < Held::kVectors; ++v) {
      held.raw[v] = inside > 0 ? reinterpret_cast<const uint4*>(at)[v] : make_uint4(0, 0, 0, 0);
    }
    held.values(0, values);
    if (inside > 0) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fill;
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = i < inside ? to_float(at[i]) : fill;
  }
}

template <class T, bool kVectors, int kSize>
__device__ __forceinline__ void put_elements(T* at, int inside, const float (&values)[kSize]) {
  if constexpr (kVectors) {
    if (inside > 0) store_slot<T, kSize, false>(at, 0, kSize, kWarp, values);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i < inside) at[i] = from_float<T>(values[i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void send_tile(T* to, const T* tile, int count) {
  const int whole = count / kVector<T> * kVector<T>;
  for (int i = whole; i < count; ++i) to[i] = tile[i];
  if (whole > 0) copy_out(to, tile, whole * int(sizeof(T)));
}

template <class Kind>
__global__ void __launch_bounds__(Kind::kThreads, 1) norm_backward_tiled(const NormBackward a) {
#if __CUDA_ARCH__ >= 900
  using X = typename Kind::X;
  using Y = typename Kind::Y;
  constexpr int kSize = Kind::kSize, kSums = Kind::kSums;
  constexpr bool kAdded = Kind::kAdded, kCentred = Kind::kCentred, kVectors = Kind::kVectors;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kMostTileStages][Kind::kThreads / kWarp];

  const int n = int(a.n), stages = a.stages, threads = blockDim.x, beside = kWarp / threads;
  const int aside = int(threadIdx.y) % beside, warp = int(threadIdx.y) / beside, warps = int(blockDim.y) / beside;
  const bool sends_for_all = threadIdx.x == 0 && aside == 0;
  const int first = int(threadIdx.x) * kSize;  // column
  const int rows_of_tile = kTileTurns * beside;
  const int64_t tiles = (a.rows + rows_of_tile - 1) / rows_of_tile;
  const int64_t step = int64_t(gridDim.x) * warps;
  const bool centred = kCentred && (!kAdded || a.mean), wants_rows = a.wants_rows();
  const int stage_bytes = Kind::stage(rows_of_tile, n);
  const int grad_y_at = Kind::template part<X>(rows_of_tile, n);
  const int grad_sum_at = grad_y_at + Kind::template part<Y>(rows_of_tile, n);
  const auto stage_at = [&](int stage) { return ring + (stage * warps + warp) * stage_bytes; };
  const auto count_of = [&](int64_t tile) { return int(min(a.rows - tile * rows_of_tile, int64_t(rows_of_tile))) * n; };

  const auto fetch = [&](int64_t tile, int stage) {
    if (tile >= tiles) return;
    const int64_t base = tile * rows_of_tile * n;
    const int count = count_of(tile);
    const X* const x = static_cast<const X*>(a.x) + base;
    const Y* const grad_y = static_cast<const Y*>(a.grad_y) + base;
    const X* const grad_sum = kAdded && a.grad_sum ? static_cast<const X*>(a.grad_sum) + base : nullptr;
    unsigned char* const to = stage_at(stage);
    uint64_t* const barrier = &arrived[stage][warp];
    const int x_bytes = prepare_tile(reinterpret_cast<X*>(to), x, count);
    const int grad_bytes = prepare_tile(reinterpret_cast<Y*>(to + grad_y_at), grad_y, count);
    const int sum_bytes = grad_sum ? prepare_tile(reinterpret_cast<X*>(to + grad_sum_at), grad_sum, count) : 0;
    barrier_expect(barrier, x_bytes + grad_bytes + sum_bytes);
    if (x_bytes > 0) copy_in(to, x, x_bytes, barrier);
    if (grad_bytes > 0) copy_in(to + grad_y_at, grad_y, grad_bytes, barrier);
    if (sum_bytes > 0) copy_in(to + grad_sum_at, grad_sum, sum_bytes, barrier);
  };

  int64_t tile = int64_t(blockIdx.x) * warps + warp;
  let_next_start();
  wait_for_earlier();
  const uint64_t seed = kAdded && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  if (sends_for_all) {
    for (int stage = 0; stage < stages; ++stage) barrier_init(&arrived[stage][warp], 1);
    publish_barriers();
    for (int stage = 0; stage < stages; ++stage) fetch(tile + stage * step, stage);
  }
  __syncthreads();

  float weight[kSize];
  weights_of_columns<Y, true>(a, first, weight);
  ColumnSums<kSize, kSums> columns[1] = {};
  float mean[kTileTurns], rstd[kTileTurns], next_mean[kTileTurns], next_rstd[kTileTurns];
  const auto statistics = [&](int64_t of, float (&means)[kTileTurns], float (&rstds)[kTileTurns]) {
#pragma unroll
    for (int r = 0; r < kTileTurns; ++r) {
      const int64_t row = of * rows_of_tile + r * beside + aside;
      means[r] = centred && row < a.rows ? a.mean[row] : 0.f;
      rstds[r] = row < a.rows ? a.rstd[row] : 0.f;
    }
  };
  statistics(tile, mean, rstd);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (; tile < tiles; tile += step) {
    statistics(tile + step, next_mean, next_rstd);
    unsigned char* const parts = stage_at(stage);
    X* const x_tile = reinterpret_cast<X*>(parts);
    Y* const grad_tile = reinterpret_cast<Y*>(parts + grad_y_at);
    const X* const sum_tile = reinterpret_cast<const X*>(parts + grad_sum_at);
    const int count = count_of(tile);
    barrier_wait(&arrived[stage][warp], parity);
    constexpr int kRows = 2;  // at a time
#pragma unroll
    for (int pair = 0; pair < kTileTurns; pair += kRows) {
      float values[kRows][kSize], grad[kRows][kSize], sums[2 * kRows] = {};
      const auto place = [&](int r) { return ((pair + r) * beside + aside) * n + first; };
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int at = place(r), inside = at < count ? n - first : 0;
        take_elements<X, kVectors>(x_tile + at, inside, mean[pair + r], values[r]);
        take_elements<Y, kVectors>(grad_tile + at, inside, 0.f, grad[r]);
        first_pass<kSize, kSums, kCentred>(values[r], grad[r], weight, mean[pair + r], rstd[pair + r], columns[0],
                                           sums[2 * r], sums[2 * r + 1]);
      }
      if (!wants_rows) continue;
      sum_in_warp(sums, threads);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        RowTerms terms;
        terms.mean = mean[pair + r], terms.rstd = rstd[pair + r];
        terms.set(a, centred, sums[2 * r], sums[2 * r + 1]);
        second_pass<kSize, kCentred>(values[r], weight, terms, grad[r]);
        const int at = place(r), inside = at < count ? n - first : 0;
        if constexpr (kAdded) {
          if (a.grad_sum) {
            take_elements<X, kVectors>(sum_tile + at, inside, 0.f, values[r]);
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[r][i] += values[r][i];
          }
        }
        put_elements<X, kVectors>(x_tile + at, inside, grad[r]);
        if constexpr (kAdded) {
          if (a.dropout.seed) {
            float multipliers[kSize];
            dropout_row<kSize, !kVectors>(a.dropout, seed, tile * rows_of_tile * n + at, multipliers);
#pragma unroll
            for (int i = 0; i < kSize; ++i) grad[r][i] *= multipliers[i];
          }
#pragma unroll
          for (int i = 0; i < kSize; ++i) columns[0].x_bias[i] += i < inside ? grad[r][i] : 0.f;
          if (a.grad_dropped) put_elements<Y, kVectors>(grad_tile + at, inside, grad[r]);
        }
      }
    }
    if (wants_rows) show_to_copies();
    __syncwarp();
    if (sends_for_all) {
      const int64_t base = tile * rows_of_tile * n;
      if (a.grad_x && wants_rows) send_tile(static_cast<X*>(a.grad_x) + base, x_tile, count);
      if (kAdded && a.grad_dropped) send_tile(static_cast<Y*>(a.grad_dropped) + base, grad_tile, count);
      // The tile before has left once all but what this one sent is read.
      if (a.grad_x && kAdded && a.grad_dropped) {
        asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
      } else {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      }
      if (tile >= step) fetch(tile + (stages - 1) * step, stage == 0 ? stages - 1 : stage - 1);
    }
    if (++stage == stages) stage = 0, parity ^= 1;
#pragma unroll
    for (int r = 0; r < kTileTurns; ++r) mean[r] = next_mean[r], rstd[r] = next_rstd[r];
  }
  if (sends_for_all) wait_for_copies_out();
  if (!a.partials) return;
  __syncthreads();  // the rings are done with
  write_partials<Kind>(a, columns, reinterpret_cast<float*>(ring), int(blockIdx.x));
#endif
}

// The host's half.
struct TilePlan {
  int threads = 0;  // of a row; 0: such rows have no tiles
  int warps = 0, stages = 0, blocks = 0;
  size_t shared = 0;
};

template <class X, class Y, int kSums, bool kCentred>
struct TileFamily {
  template <bool kVectors>
  using Kind = TileKind<X, Y, kSums, kCentred, kVectors>;

  static TilePlan plan(int64_t rows, int64_t n, const Device& device) {
    constexpr int kSize = Kind<true>::kSize, kMostWarps = Kind<true>::kThreads / kWarp;
    TilePlan plan;
    const int64_t vectors = divide_up(n, kSize);
    if (!device.clusters || vectors > (n % kSize == 0 ? kWarp : kLongestOddRow)) return plan;
    plan.threads = power_of_two_from(vectors);
    const int rows_of_tile = kTileTurns * (kWarp / plan.threads);
    const int64_t tiles = divide_up(rows, rows_of_tile);
    const int stage = Kind<true>::stage(rows_of_tile, int(n));
    const int room = device.shared_a_block - 1024;
    plan.blocks = int(std::min<int64_t>(tiles, device.processors));
    plan.warps = int(std::min<int64_t>({kMostWarps, room / stage / kLeastTileStages, divide_up(tiles, plan.blocks)}));
    plan.stages = std::min(kMostTileStages, room / (stage * plan.warps));
    const size_t sums = size_t(kSums) * plan.warps * plan.threads * kSize * sizeof(float);
    plan.shared = std::max(size_t(plan.stages) * plan.warps * stage, sums);
    return plan;
  }

  // False if there are no tiles of these rows.
  static bool run(NormBackward a, const Device& device, void* stream, int& error) {
    const TilePlan plan = TileFamily::plan(a.rows, a.n, device);
    if (plan.threads == 0) return false;
    for (const void* tensor : {a.grad_y, a.grad_sum, a.x, static_cast<const void*>(a.grad_x),
                               static_cast<const void*>(a.grad_dropped)}) {
      if (offset_in_vector(tensor) != 0) return false;
    }
    a.stages = plan.stages;
    const dim3 block(unsigned(plan.threads), unsigned(plan.warps * (kWarp / plan.threads)));
    const auto kernel = a.n % Kind<true>::kSize == 0 ? norm_backward_tiled<Kind<true>> : norm_backward_tiled<Kind<false>>;
    int count = 0;
    const cudaError_t found = resident_clusters(kernel, device, plan.warps * kWarp, plan.shared, 1, count);
    error = int(found);
    if (found == cudaSuccess) error = launch(kernel, a, plan.blocks, block, plan.shared, 1, stream, true);
    if (!error && a.partials) error = add_partials<Y>(a, kSums, plan.blocks, true, stream);
    return true;
  }
};

}  // namespace fuseline
