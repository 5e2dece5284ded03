// The norms' backward for many rows that do not keep to 16-byte steps, of one dtype, longer than tiles are
// (norm_backward_tiled.cuh) and shorter than a cluster's (norm_backward_pieces.cuh) (sm_90).
//
// Moves: as norm_backward_rows.cuh. Limit: HBM bandwidth, for which rows run ahead of the arithmetic, and instructions: to
// shift vectors into place takes more, 4,097 of 16 bits read 0.40 to 0.44 of the copy bandwidth so, here 0.58 to 0.75. By
// single elements of 16 bits, 36 instructions each, norms of x alone read 0.64 to 0.89 from 1,001 on (by pairs 0.65 to 0.80)
// and sums of 1,001 0.69 (0.85).
//
// Threads: blocks stay, and each has rows of its own. Thread t has units t, t + threads, ... of each row, single elements of
// fp32 and pairs of 16 bits, and the sums of these columns; lanes side by side read units side by side, wherever in a vector
// a row begins, pairs of a row that begins in the middle of a word out of two words. One thread sends for rows, with the
// vectors that they stand in; a row's threads meet once, by when all of it is in registers. Nothing is asked of each unit
// before that: beside a row threads take its last, with a gradient of zero.
#pragma once

#include "kept.cuh"
#include "norm_backward_ring_parts.cuh"
#include "norm_sums.cuh"

namespace fuseline {

constexpr int kMostElementsStages = 8;
constexpr int kMostElementsBlocks = 32;  // of a multiprocessor

// Elements of a unit.
template <class T>
constexpr int kUnit = sizeof(T) == 2 ? 2 : 1;

// Threads of a multiprocessor that have so many units each, by registers.
template <class T>
__host__ __device__ constexpr int elements_threads_of(bool added, int held) {
  return added && held * kUnit<T> > 6 ? 768 : 1024;
}

// Unit `unit` of a row out of shared memory.
template <class T>
__device__ __forceinline__ void take_unit(const unsigned char* row, int unit, float (&values)[kUnit<T>]) {
  if constexpr (sizeof(T) == 4) {
    values[0] = reinterpret_cast<const float*>(row)[unit];
  } else {
    const bool inside = shared_address(row) & 2;  // of a word; the same for all threads
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(row - (inside ? 2 : 0)) + unit;
    uint32_t pair = words[0];
    if (inside) pair = __byte_perm(pair, words[1], 0x5432);
    const float2 both = unpack_pair<T>(pair);
    values[0] = both.x, values[1] = both.y;
  }
}

// And to memory: elements `first` .. of a row of n.
template <class T>
__device__ __forceinline__ void put_unit(T* row, int first, int n, const float (&values)[kUnit<T>]) {
  if constexpr (sizeof(T) == 4) {
    if (first < n) row[first] = values[0];
  } else if (reinterpret_cast<uintptr_t>(row) % 4 == 0 && first + 1 < n) {
    *reinterpret_cast<uint32_t*>(row + first) = pack_pair<T>(values[0], values[1]);
  } else {
    if (first < n) row[first] = from_float<T>(values[0]);
    if (first + 1 < n) row[first + 1] = from_float<T>(values[1]);
  }
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
__global__ void __launch_bounds__(elements_threads_of<T>(kAdded, kHeld), 1)
    norm_backward_elements(const ElementsBackward given) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSums = kAdded ? kSumsOfAddedNorm : kCentred ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  constexpr int kTensors = kAdded ? 3 : 2, kSize = kUnit<T>;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kMostElementsStages];
  __shared__ float2 states[2][kWarp];
  const NormBackward& a = given.norm;
  const int n = int(a.n), slot = int(threadIdx.x), threads = int(blockDim.x), units = (n + kSize - 1) / kSize;
  const int lane = slot % kWarp, warp = slot / kWarp, warps = threads / kWarp;
  const int group = given.group, beside = lane & (group - 1);  // lanes that add up a row's warps
  const int stages = given.stages, step = int(gridDim.x), stage_bytes = kTensors * given.part;
  float* const weights = reinterpret_cast<float*>(ring + stages * stage_bytes);
  unsigned char* const masks = reinterpret_cast<unsigned char*>(weights + units * kSize);  // of a row and of the next
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
  for (int i = slot; i < units * kSize; i += threads) weights[i] = i < n ? weight_at<T>(a, i) : 0.f;
  __syncthreads();
  const uint64_t seed = masked ? uint64_t(*a.dropout.seed) : 0;
  ColumnSums<kSize, kSums> columns[kHeld] = {};
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
    const unsigned char* const x_row = rows_here + head_of(a.x, base);
    const unsigned char* const grad_row = rows_here + given.part + head_of(a.grad_y, base);
    const unsigned char* const sum_row = rows_here + 2 * given.part + head_of(a.grad_sum, base);
    float apart[kHeld][kSize], weighted[kHeld][kSize], added[kAdded ? kHeld : 1][kSize] = {};
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int unit = min(slot + k * threads, units - 1), first = (slot + k * threads) * kSize;
      float grad[kSize], weight[kSize];
      take_unit<T>(grad_row, unit, grad);
      take_unit<T>(x_row, unit, apart[k]);
      if constexpr (kAdded) {
        if (sums_up) take_unit<T>(sum_row, unit, added[k]);
      }
      if constexpr (kSize == 1) {
        weight[0] = weights[unit];
      } else {
        const float2 both = reinterpret_cast<const float2*>(weights)[unit];
        weight[0] = both.x, weight[1] = both.y;
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const bool inside = first + i < n;
        if (!inside) grad[i] = 0.f;
        apart[k][i] = i == 0 || inside ? apart[k][i] - mean : 0.f;  // what stands behind a row is no number
        weighted[k][i] = grad[i] * weight[i];
        const float product = grad[i] * apart[k][i];
        columns[k].weight[i] = fmaf(product, rstd, columns[k].weight[i]);
        if constexpr (kSums > 1) columns[k].bias[i] += grad[i];
        sums.x += weighted[k][i];
        sums.y = fmaf(product, weight[i], sums.y);
      }
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
      const int first = (slot + k * threads) * kSize;
      float grad[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        grad[i] = fmaf(weighted[k][i], terms.scale, -terms.offset) - apart[k][i] * terms.slope;
        if constexpr (kAdded) grad[i] += added[k][i];
      }
      if (a.grad_x) put_unit<T>(static_cast<T*>(a.grad_x) + base, first, n, grad);
      if constexpr (kAdded) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int place = int(base % 8) + min(first + i, n - 1);
          if (masked) grad[i] *= mask[place / 8] >> place % 8 & 1 ? a.dropout.scale : 0.f;
          columns[k].x_bias[i] += grad[i];
        }
        if (a.grad_dropped) put_unit<T>(static_cast<T*>(a.grad_dropped) + base, first, n, grad);
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
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int column = (slot + k * threads) * kSize + i;
      if (column >= n) continue;
      mine[column] = columns[k].weight[i];
      if constexpr (kSums > 1) mine[kind_step + column] = columns[k].bias[i];
      if constexpr (kSums > 2) mine[2 * kind_step + column] = columns[k].x_bias[i];
    }
  }
#endif
}

// ---- host ----

// Units of a thread, of which one may have fewer or more.
template <class T>
constexpr int kFewUnits = sizeof(T) == 2 ? 3 : 4;
template <class T>
constexpr int kManyUnits = sizeof(T) == 2 ? 4 : 8;

template <class T>
int elements_threads(int64_t n, int held) {
  return int(divide_up(divide_up(n, int64_t(held * kUnit<T>)), kWarp)) * kWarp;
}

// The units of a thread, 0 where no multiprocessor holds a row: a thread has 110 instructions a row, and by estimate 44 a unit,
// beside the row or not. Of fp32 few, as long as a multiprocessor has two blocks.
template <class T>
int elements_held(int64_t n, bool added) {
  constexpr int kFew = kFewUnits<T>, kMany = kManyUnits<T>;
  const auto fits = [&](int held) { return elements_threads<T>(n, held) <= elements_threads_of<T>(added, held); };
  const auto cost = [&](int held) { return elements_threads<T>(n, held) * (110 + 44 * held); };
  const bool few = sizeof(T) == 4 ? elements_threads<T>(n, kFew) <= 512 : !fits(kMany) || cost(kFew) <= cost(kMany);
  const int held = few ? kFew : kMany;
  return fits(held) ? held : 0;
}

template <class T>
int64_t elements_blocks(int64_t rows, int64_t n, bool added, const Device& device) {
  const int held = elements_held<T>(n, added);
  if (held == 0) return 0;
  const int beside = std::min(kMostElementsBlocks, elements_threads_of<T>(added, held) / elements_threads<T>(n, held));
  return std::min<int64_t>(rows, int64_t(beside) * device.processors);
}

template <class T, bool kCentred, bool kAdded>
bool run_elements_backward(const NormBackward& a, const Device& device, void* stream, int& error) {
  constexpr int kTensors = kAdded ? 3 : 2, kLeastStages = 2;
  constexpr int64_t kStatic = 1664, kGrain = 128;  // bytes of a block beside its ring, and what it is given a multiple of
  const int held = elements_held<T>(a.n, kAdded);
  if (held == 0) return false;
  const int threads = elements_threads<T>(a.n, held);
  ElementsBackward given{a};
  given.group = power_of_two_from(threads / kWarp);
  given.part = int(divide_up(a.n * int64_t(sizeof(T)) + 30, 16)) * 16;
  const int64_t kept = (a.n + 1) * 4 + (a.dropout.seed ? 2 * mask_bytes(int(a.n)) : 0);
  const int64_t stage = int64_t(kTensors) * given.part;
  int64_t blocks = elements_blocks<T>(a.rows, a.n, kAdded, device) / device.processors;  // of a multiprocessor
  const auto room = [&] { return device.shared_a_processor / blocks / kGrain * kGrain; };
  const auto stages_of = [&] { return (room() - kStatic - kept) / stage; };
  while (blocks > 1 && stages_of() < kLeastStages) --blocks;
  if (blocks < 1 || stages_of() < kLeastStages) return false;
  given.stages = int(std::min<int64_t>(kMostElementsStages, stages_of()));
  const size_t bytes = size_t(given.stages * stage + kept);
  const auto kernel = held == kFewUnits<T> ? norm_backward_elements<T, kCentred, kAdded, kFewUnits<T>>
                                           : norm_backward_elements<T, kCentred, kAdded, kManyUnits<T>>;
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
