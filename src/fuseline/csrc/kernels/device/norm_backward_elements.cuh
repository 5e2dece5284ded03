// The norms' backward for many rows that do not keep to 16-byte steps, of one dtype, longer than tiles are
// (norm_backward_tiled.cuh) and shorter than a cluster's (norm_backward_pieces.cuh) (sm_90).
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth, for which rows run ahead of the arithmetic, and accesses to shared
// memory, three an element and one more for each tensor that is added. To shift vectors into place takes more than to read
// single elements: of 4,097 of 16 bits 0.44 of the copy bandwidth.
//
// Threads: blocks stay, and each has rows of its own. Thread t has elements t, t + threads, ... of each, and the sums of these
// columns, so that lanes side by side read elements side by side, wherever in a vector a row begins. One thread sends for
// rows, with the vectors that they stand in; a row's threads meet once, by when all of it is in registers. Nothing is asked
// of each element before that: beside a row they take its last, with a gradient of zero.
#pragma once

#include "kept.cuh"
#include "norm_backward_ring_parts.cuh"
#include "norm_sums.cuh"

namespace fuseline {

constexpr int kMostElementsStages = 8;
constexpr int kMostElementsBlocks = 32;  // of a multiprocessor

// Threads of a multiprocessor that have so many elements each, by registers.
__host__ __device__ constexpr int elements_threads_of(bool added, int held) {
  if (held <= 4) return 1024;
  if (held <= 6) return added ? 768 : 1024;
  if (held <= 8) return added ? 512 : 768;
  return added ? 512 : 704;
}

struct ElementsBackward {
  NormBackward norm;
  int stages;
  int part;   // bytes of a tensor's row in a stage
  int group;  // warps of a block, up to a power of two
};

// Bytes of an n-element row's mask, by eights of the tensor's elements.
__host__ __device__ inline int mask_bytes(int n) { return (n + 7) / 8 + 1; }

template <class T, bool kCentred, bool kAdded, int kHeld>
__global__ void __launch_bounds__(elements_threads_of(kAdded, kHeld), 1)
    norm_backward_elements(const ElementsBackward given) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSums = kAdded ? kSumsOfAddedNorm : kCentred ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  constexpr int kTensors = kAdded ? 3 : 2;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kMostElementsStages];
  __shared__ float2 states[2][kWarp];
  const NormBackward& a = given.norm;
  const int n = int(a.n), slot = int(threadIdx.x), threads = int(blockDim.x);
  const int lane = slot % kWarp, warp = slot / kWarp, warps = threads / kWarp;
  const int group = given.group, beside = lane & (group - 1);  // lanes that add up a row's warps
  const int stages = given.stages, step = int(gridDim.x), stage_bytes = kTensors * given.part;
  float* const weights = reinterpret_cast<float*>(ring + stages * stage_bytes);
  unsigned char* const masks = reinterpret_cast<unsigned char*>(weights + n);  // of a row and of the next
  const auto fetch = [&](int64_t row, int stage) {
    if (row >= a.rows) return;
    unsigned char* const to = ring + stage * stage_bytes;
    const int64_t at = row * n;
    const Span<T, true> x(a.x, at, n * int(sizeof(T))), grad_y(a.grad_y, at, n * int(sizeof(T)));
    const Span<T, true> grad_sum(a.grad_sum, at, kAdded && a.grad_sum ? n * int(sizeof(T)) : 0);
    barrier_expect(&arrived[stage], x.bytes + grad_y.bytes + grad_sum.bytes);
    copy_in(to, x.first, x.bytes, &arrived[stage]);
    copy_in(to + given.part, grad_y.first, grad_y.bytes, &arrived[stage]);
    if (kAdded && grad_sum.bytes > 0) copy_in(to + 2 * given.part, grad_sum.first, grad_sum.bytes, &arrived[stage]);
  };
  // Where a row that begins with this element of its tensor begins in its vectors.
  const auto head_of = [&](const void* tensor, int64_t element) {
    return (uint32_t(reinterpret_cast<uintptr_t>(tensor)) + uint32_t(element) * uint32_t(sizeof(T))) % 16;
  };
  const auto has = [&](int k) { return slot + k * threads < n; };
  const bool centred = kCentred && (!kAdded || a.mean), masked = kAdded && a.dropout.seed, sums_up = kAdded && a.grad_sum;
  const auto mean_of_row = [&](int64_t row) { return centred && row < a.rows ? a.mean[row] : 0.f; };
  const auto rstd_of_row = [&](int64_t row) { return row < a.rows ? a.rstd[row] : 0.f; };

  let_next_start();
  if (slot == 0) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) barrier_init(&arrived[stage], 1);
    publish_barriers();
  }
  __syncthreads();
  wait_for_earlier();
  if (slot == 0) {
    for (int stage = 0; stage < stages; ++stage) fetch(blockIdx.x + int64_t(stage) * step, stage);
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (has(k)) weights[slot + k * threads] = weight_at<T>(a, slot + k * threads);
  }
  __syncthreads();
  const uint64_t seed = masked ? uint64_t(*a.dropout.seed) : 0;
  ColumnSums<kHeld, kSums> columns = {};
  int stage = 0, parity = 0, turn = 0;
  float mean = mean_of_row(blockIdx.x), rstd = rstd_of_row(blockIdx.x);
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < a.rows; row += step, turn ^= 1) {
    const float next_mean = mean_of_row(row + step), next_rstd = rstd_of_row(row + step);
    unsigned char* const mask = masks + turn * mask_bytes(n);
    const int64_t base = row * n;
    if (masked) {
      for (int eight = slot; eight < mask_bytes(n); eight += threads) {
        mask[eight] = kept_of<8>(a.dropout, seed, base / 8 * 8 + eight * 8);
      }
    }
    barrier_wait(&arrived[stage], parity);
    const unsigned char* const rows_here = ring + stage * stage_bytes;
    const T* const x_row = reinterpret_cast<const T*>(rows_here + head_of(a.x, base));
    const T* const grad_row = reinterpret_cast<const T*>(rows_here + given.part + head_of(a.grad_y, base));
    const T* const sum_row = reinterpret_cast<const T*>(rows_here + 2 * given.part + head_of(a.grad_sum, base));
    float apart[kHeld], weighted[kHeld], added[kAdded ? kHeld : 1];
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = min(slot + k * threads, n - 1);
      const float grad = has(k) ? to_float(grad_row[i]) : 0.f;
      apart[k] = to_float(x_row[i]) - mean;
      if constexpr (kAdded) added[k] = sums_up ? to_float(sum_row[i]) : 0.f;
      weighted[k] = grad * weights[i];
      columns.weight[k] += grad * apart[k] * rstd;
      if constexpr (kSums > 1) columns.bias[k] += grad;
      sums.x += weighted[k];
      sums.y += weighted[k] * apart[k];
    }
    sums = sum_over_warp(sums);
    if (warps > 1) {
      if (lane == 0) states[turn][warp] = sums;
      __syncthreads();
      sums = sum_of_lanes(beside < warps ? states[turn][beside] : make_float2(0.f, 0.f), group);
    } else {
      __syncwarp();
    }
    if (slot == 0) fetch(row + int64_t(stages) * step, stage);
    RowTerms terms;
    terms.mean = mean, terms.rstd = rstd;
    terms.set(a, centred, sums.x, sums.y);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = slot + k * threads;
      float grad = weighted[k] * terms.scale - terms.offset - apart[k] * terms.slope;
      if constexpr (kAdded) grad += added[k];
      if (a.grad_x && has(k)) static_cast<T*>(a.grad_x)[base + i] = from_float<T>(grad);
      if constexpr (kAdded) {
        if (masked) {
          const int place = int(base % 8) + min(i, n - 1);
          grad *= mask[place / 8] >> place % 8 & 1 ? a.dropout.scale : 0.f;
        }
        columns.x_bias[k] += grad;
        if (a.grad_dropped && has(k)) static_cast<T*>(a.grad_dropped)[base + i] = from_float<T>(grad);
      }
    }
    mean = next_mean, rstd = next_rstd;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  if (!a.partials) return;
  const int64_t kind_step = int64_t(gridDim.x) * a.columns;
  float* const mine = a.partials + blockIdx.x * a.columns;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = slot + k * threads;
    if (i >= n) continue;
    mine[i] = columns.weight[k];
    if constexpr (kSums > 1) mine[kind_step + i] = columns.bias[k];
    if constexpr (kSums > 2) mine[2 * kind_step + i] = columns.x_bias[k];
  }
#endif
}

// ---- host ----

inline int elements_threads(int64_t n, int held) { return int(divide_up(divide_up(n, held), kWarp)) * kWarp; }

// Elements of a thread, 0 where no multiprocessor holds a row: one costs it some 130 instructions and 25 for each element,
// beside the row or not.
inline int elements_held(int64_t n, bool added) {
  int best = 0;
  const auto cost = [&](int held) { return elements_threads(n, held) * (130 + 25 * held); };
  for (const int held : {4, 6, 8, 12}) {
    const bool fits = elements_threads(n, held) <= elements_threads_of(added, held);
    if (fits && (best == 0 || cost(held) < cost(best))) best = held;
  }
  return best;
}

inline int64_t elements_blocks(int64_t rows, int64_t n, bool added, const Device& device) {
  const int held = elements_held(n, added);
  if (held == 0) return 0;
  const int beside = std::min(kMostElementsBlocks, elements_threads_of(added, held) / elements_threads(n, held));
  return std::min<int64_t>(rows, int64_t(beside) * device.processors);
}

template <class T, bool kCentred, bool kAdded>
bool run_elements_backward(const NormBackward& a, const Device& device, void* stream, int& error) {
  constexpr int kTensors = kAdded ? 3 : 2, kLeastStages = 2;
  constexpr int64_t kStatic = 1664;  // bytes of a block beside its ring
  const int held = elements_held(a.n, kAdded);
  if (held == 0) return false;
  const int threads = elements_threads(a.n, held);
  ElementsBackward given{a};
  given.group = power_of_two_from(threads / kWarp);
  given.part = int(divide_up(a.n * int64_t(sizeof(T)) + 30, 16)) * 16;
  const int64_t kept = a.n * 4 + (a.dropout.seed ? 2 * mask_bytes(int(a.n)) : 0);
  const int64_t stage = int64_t(kTensors) * given.part;
  int64_t blocks = elements_blocks(a.rows, a.n, kAdded, device) / device.processors;  // of a multiprocessor
  const auto stages_of = [&] { return (device.shared_a_processor / blocks - kStatic - kept) / stage; };
  while (blocks > 1 && stages_of() < kLeastStages) --blocks;
  if (blocks < 1 || stages_of() < kLeastStages) return false;
  given.stages = int(std::min<int64_t>(kMostElementsStages, stages_of()));
  const size_t bytes = size_t(given.stages * stage + kept);
  const auto kernel = held == 4   ? norm_backward_elements<T, kCentred, kAdded, 4>
                      : held == 6 ? norm_backward_elements<T, kCentred, kAdded, 6>
                      : held == 8 ? norm_backward_elements<T, kCentred, kAdded, 8>
                                  : norm_backward_elements<T, kCentred, kAdded, 12>;
  int count = 0;
  error = int(resident_clusters(kernel, device, threads, bytes, 1, count));
  if (error || count == 0) return error != 0;
  const int64_t grid = std::min<int64_t>({count, blocks * device.processors, a.rows});
  error = launch(kernel, given, grid, dim3(unsigned(threads)), bytes, 1, stream, true);
  if (!error && a.partials) {
    constexpr int kSums = kAdded ? kSumsOfAddedNorm : kCentred ? kSumsOfLayerNorm : kSumsOfRmsNorm;
    error = add_partials<T>(a, kSums, int(grid), true, stream);
  }
  return true;
}

}  // namespace fuseline
