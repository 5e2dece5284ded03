// One row of activations times quantized weights on Hopper: y = x W^T + bias, each warp a stream of weights. What may stand around
// the layer is that of linear_stream.cuh.
//
// Floor: the bytes of W over the copy bandwidth; for 4096 x 12288 that is 11.9 us in int8 and 6.1 in int4 at 4.24 TB/s. A
// multiprocessor has to have 32 KB under way to reach it.
//
// Tiles (16 rows of W) are dealt to one block a multiprocessor. What a block has is one run of steps of 1 KB, tile after tile, cut
// evenly among its warps, wherever the cuts fall in a tile. A warp has a ring of steps in shared memory, each asked for anew by a bulk
// copy as soon as it is used: between the first step and the last there is no barrier of the block. Two launches have room on a
// multiprocessor, so that the next one's rings are full when this one ends.
//
// x is turned to digits, the weights are multiplied as they are (linear_row_digits.cuh). Pieces of a tile meet in shared memory, in
// the order of warps: the same bits each run.
#pragma once

#include "device/waiting.cuh"
#include "linear_row_digits.cuh"

namespace fuseline {

template <class T, class Weights>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) linear_row_kernel(const __grid_constant__ LinearArguments a) {
  constexpr int kTileBytes = Weights::kVectors * kWarp * 16, kChunks = kRowStepBytes / kTileBytes;
  constexpr int kHeld = kRowHeld;
  extern __shared__ __align__(16) char shared[];
  __shared__ uint64_t arrived[kRowWarps][kRowSlots];
  __shared__ int cut_unit[kRowWarps];  // the tile of the block that a warp begins within, or none
  __shared__ float room[2][kRowWarps];
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int group = lane / 4, quad = lane % 4, block = blockIdx.x;
  const int grain = a.halves ? 2 : 1;
  const int first_place = (block * a.base + min(block, a.extra)) * grain, tiles = (a.base + (block < a.extra)) * grain;
  const int most_tiles = (a.base + (a.extra > 0)) * grain;
  const int total = tiles * a.steps, begin = int(uint32_t(total) * warp / kRowWarps);
  int left = int(uint32_t(total) * (warp + 1) / kRowWarps) - begin;  // steps to be multiplied

  char* const ring = shared + warp * (kRowSlots * kRowStepBytes);
  const uint32_t shared_at = uint32_t(__cvta_generic_to_shared(shared)), digits = shared_at + kRowRingBytes;
  const uint32_t factors = digits + a.steps * (kChunks * kDigitBytes), scales = factors + a.steps * kFactorBytes;
  float* const pieces = reinterpret_cast<float*>(shared + kRowRingBytes + a.x_bytes);  // of what warps begin within a tile, then of tiles
  float2* const scales_and_shifts = reinterpret_cast<float2*>(pieces + (kRowWarps + most_tiles) * kTileRows);

  // The next step to be asked for, and where it stands; lane 0's.
  int unit = int(uint32_t(begin) / uint32_t(a.steps)), at = begin - unit * a.steps;
  int next_unit = unit, next_at = at;
  const char* from = nullptr;
  const auto point = [&] {
    from = a.weight + int64_t(tile_at(a, first_place + next_unit)) * a.chunks * kTileBytes + int64_t(next_at) * kRowStepBytes;
  };
  const auto fetch = [&](int slot) {
    const int bytes = min(kChunks, a.chunks - next_at * kChunks) * kTileBytes;  // past the end any integers will do: x is zero there
    barrier_expect(&arrived[warp][slot], bytes);
    copy_in(ring + slot * kRowStepBytes, from, bytes, &arrived[warp][slot]);
    from += kRowStepBytes;
    if (++next_at == a.steps) {
      next_at = 0, ++next_unit;
      point();
    }
  };
  // Asks the L2 for steps of this warp, one a lane: what HBM does while the block gets ready is not waited for later.
  const auto prefetch = [&](int first, int last) {
    if (lane < first || lane >= min(last, left)) return;
    const int of = begin + lane, step = of % a.steps;
    const int64_t tile = tile_at(a, first_place + of / a.steps);
    prefetch_to_l2(a.weight + tile * a.chunks * kTileBytes + int64_t(step) * kRowStepBytes,
                   min(kChunks, a.chunks - step * kChunks) * kTileBytes);
  };
  if (lane == 0) {
#pragma unroll
    for (int u = 0; u < kRowSlots; ++u) barrier_init(&arrived[warp][u], 1);
    publish_barriers();
  }
  __syncwarp();
  if (!a.overlap) {
    prefetch_norm<kRowThreads>(a);
    prefetch(0, kRowSlots);
    wait_for_earlier();
  }
  if (lane == 0 && left > 0) {
    point();
#pragma unroll 1
    for (int u = 0; u < min(kRowSlots, left); ++u) fetch(u);
  }
  if constexpr (Weights::kGrouped) {  // [tile][group][8 words], two of 16 bytes a group
    const int a_tile = a.groups * 2;
    for (int i = thread; i < tiles * a_tile; i += kRowThreads) {
      const int of = i / a_tile;
      copy_async(scales + i * 16, a.scales + (int64_t(tile_at(a, first_place + of)) * a_tile + i - of * a_tile) * 4);
    }
    commit_copies();
  }
  if (a.overlap) {
    prefetch_norm<kRowThreads>(a);  // behind the weights: whatever stands before these, HBM waits for
    prefetch(kRowSlots, a.prefetched_early);
    wait_for_earlier();
  }

  const int vectors = a.steps * kChunks * (kTileColumns / 8), there = a.k / 8;
  uint4 raw[kHeld], norm_weights[kHeld];
  const auto load_x = [&](int first) {
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int of = first + u * kRowThreads;
      raw[u] = make_uint4(0, 0, 0, 0);
      if (of < there) raw[u] = *reinterpret_cast<const uint4*>(a.x + of * 16);
    }
  };
  load_x(thread);
  if (a.norm != FUSELINE_NORM_NONE) {
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int of = thread + u * kRowThreads;
      norm_weights[u] = make_uint4(0, 0, 0, 0);
      if (of < there) norm_weights[u] = __ldg(reinterpret_cast<const uint4*>(a.norm_weight) + of);
    }
  }
  let_next_start();
  prefetch(max(kRowSlots, a.prefetched_early), a.prefetched);

  // The residual comes now and counts as a bias: at the end it would be waited for.
  const bool shifted = a.residual && a.activation == FUSELINE_ACTIVATION_NONE;
  for (int row = thread; row < tiles * kTileRows; row += kRowThreads) {
    const int feature = tile_at(a, first_place + row / kTileRows) * kTileRows + row % kTileRows;
    if (feature >= a.n) continue;
    const float scale = Weights::kGrouped ? 1.f : __uint_as_float(__ldg(a.scales + feature));
    const float bias = a.bias ? to_float(reinterpret_cast<const T*>(a.bias)[feature]) : 0.f;
    const float residual = shifted ? to_float(reinterpret_cast<const T*>(a.residual)[feature]) : 0.f;
    scales_and_shifts[row] = make_float2(scale, bias + residual);
  }
  if (lane == 0) cut_unit[warp] = left > 0 && at > 0 ? unit : -1;

  if (a.norm != FUSELINE_NORM_NONE) {  // of a row that the block holds whole
    const auto sum_of_block = [&](float* to, const auto& term) {
      float sum = 0.f;
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        if (thread + u * kRowThreads >= there) break;
        float values[8];
        unpack<T>(raw[u], values);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += term(values[e]);
      }
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) to[warp] = sum;
      __syncthreads();
      sum = 0.f;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) sum += to[w];
      return sum;
    };
    const float mean = a.norm == FUSELINE_NORM_LAYER ? sum_of_block(room[0], [](float x) { return x; }) / a.k : 0.f;
    const float squares = sum_of_block(room[1], [&](float x) { return (x - mean) * (x - mean); });
    const float rstd = rsqrtf(squares / a.k + a.eps);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int of = thread + u * kRowThreads;
      if (of >= there) break;
      float values[8], weight[8], shift[8] = {};
      unpack<T>(raw[u], values);
      unpack<T>(norm_weights[u], weight);
      if (a.norm_bias) unpack<T>(__ldg(reinterpret_cast<const uint4*>(a.norm_bias) + of), shift);
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = fmaf((values[e] - mean) * rstd, weight[e], shift[e]);
      raw[u] = pack<T>(values);
    }
  }
  for (int first = thread;;) {
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int of = first + u * kRowThreads;
      if (of - lane >= vectors) break;
      store_digits<T, Weights>(digits, factors, of, of < vectors, raw[u]);
    }
    first += kHeld * kRowThreads;
    if (first - lane >= vectors) break;
    load_x(first);
  }
  if constexpr (Weights::kGrouped) wait_for_copies<0>();
  __syncthreads();

  float sums[2] = {};
  float* piece = pieces + (at > 0 ? warp : kRowWarps + unit) * kTileRows;
  const auto put_down = [&] {
    join_digits<Weights>(sums);
    if (quad == 0) piece[group] = sums[0], piece[group + 8] = sums[1];
    sums[0] = sums[1] = 0.f;
    piece = pieces + (kRowWarps + ++unit) * kTileRows;
    at = 0;
  };
  const uint32_t ring_at = uint32_t(__cvta_generic_to_shared(ring)) + lane * 16;
  const uint32_t digits_at = digits + (group % kRowDigits * 4 + quad) * 16, factors_at = factors + quad % 2 * 8;
  const int group_steps = a.group_shift - 2;
  for (int phase = 0; left > 0; left -= kRowSlots, phase ^= 1) {
#pragma unroll
    for (int u = 0; u < kRowSlots; ++u) {
      if (u >= left) break;
      barrier_wait(&arrived[warp][u], phase);
      const uint32_t scales_at = scales + ((unit * a.groups + (at >> group_steps)) * 8 + group) * 4;
      multiply_digits<Weights>(ring_at + u * kRowStepBytes, digits_at + at * (kChunks * kDigitBytes), factors_at + at * kFactorBytes,
                               scales_at, sums);
      __syncwarp();  // all lanes have read the step
      if (lane == 0 && u + kRowSlots < left) fetch(u);
      if (++at == a.steps) put_down();
    }
  }
  prefetch_next(a);
  if (at > 0) put_down();  // of a warp with nothing to do nobody reads it
  __syncthreads();

  const auto whole = [&](int row) {  // of all warps
    float sum = pieces[kRowWarps * kTileRows + row];
#pragma unroll
    for (int w = 1; w < kRowWarps; ++w) {
      if (cut_unit[w] == row / kTileRows) sum += pieces[w * kTileRows + row % kTileRows];
    }
    return sum;
  };
  for (int row = thread; row < tiles * kTileRows; row += kRowThreads) {
    const int feature = tile_at(a, first_place + row / kTileRows) * kTileRows + row % kTileRows;
    if (feature >= a.n || (a.halves && row / kTileRows % 2)) continue;
    const float residual = a.residual && !shifted ? to_float(reinterpret_cast<const T*>(a.residual)[feature]) : 0.f;
    const float2 own = scales_and_shifts[row];
    float other = 0.f;
    if (a.halves) {
      const float2 its = scales_and_shifts[row + kTileRows];
      other = fmaf(whole(row + kTileRows), its.x, its.y);
    }
    const float y = activated<T>(a, fmaf(whole(row), own.x, own.y), other);
    reinterpret_cast<T*>(a.y)[feature] = from_float<T>(y + residual);
  }
}

}  // namespace fuseline
