// The rows of a table's gradient for few ids: each warp holds all ids in registers, and takes a slice of a row at a time.
//
// A ballot a register says which items are of the row, in order; their columns are added up in fp32 and written, zeros where
// there is none. One launch, no barrier, no sort; each element of the gradient is written once, sums in the order of
// the items.
#pragma once

#include "embedding.cuh"

namespace fuseline {

constexpr int kFewBlock = 256;
constexpr int kFewWarps = kFewBlock / kWarp;
constexpr int kIdsOfLane = 16;
constexpr int kMostFewIds = kIdsOfLane * kWarp;
constexpr int kFewColumns = 2, kFewAhead = 2;  // accesses of a lane at a time, and items of each

struct FewSums {
  const void* grad_out;
  const int64_t* ids;  // item i's is ids[i % period]; those outside 0 .. rows, and `skipped`, add nothing
  int64_t period, skipped;
  void* result;
  uint32_t items, rows, tasks, accesses, slice;  // accesses of a row, and of a task
  int64_t n;
  Divisor slices;  // of a row
  Dropout dropout;
};

template <class T, int kWide>
__global__ void __launch_bounds__(kFewBlock, 3) embedding_few_sums(const FewSums a) {
  let_next_start();
  wait_for_earlier();
  __shared__ uint16_t lists[kFewWarps][kMostFewIds];
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint16_t* const list = lists[warp];
  int64_t wide_ids[kIdsOfLane];
#pragma unroll
  for (int w = 0; w < kIdsOfLane; ++w) {
    const uint32_t item = w * kWarp + lane;
    wide_ids[w] = -1;
    if (item < a.items) wide_ids[w] = __ldg(a.ids + (a.period >= a.items ? item : item % uint32_t(a.period)));
  }
  uint32_t ids[kIdsOfLane];
#pragma unroll
  for (int w = 0; w < kIdsOfLane; ++w) {
    const bool inside = wide_ids[w] >= 0 && wide_ids[w] < int64_t(a.rows) && wide_ids[w] != a.skipped;
    ids[w] = inside ? uint32_t(wide_ids[w]) : 0xffffffffu;
  }
  const uint64_t seed = seed_of(a.dropout);
  for (uint32_t task = blockIdx.x * kFewWarps + warp; task < a.tasks; task += gridDim.x * kFewWarps) {
    const uint32_t row = a.slices.divide(task), begin = (task - row * a.slices.value) * a.slice;
    const uint32_t end = min(begin + a.slice, a.accesses);
    uint32_t hits = 0;
#pragma unroll
    for (int w = 0; w < kIdsOfLane; ++w) {
      if (w * kWarp >= a.items) continue;
      const uint32_t of_row = __ballot_sync(kAllLanes, ids[w] == row);
      if (ids[w] == row) list[hits + __popc(of_row & ((1u << lane) - 1))] = uint16_t(w * kWarp + lane);
      hits += __popc(of_row);
    }
    T* const to = static_cast<T*>(a.result) + int64_t(row) * a.n;
    if (hits == 0) {
      const float zeros[kWide] = {};
#pragma unroll 4
      for (uint32_t c = begin + lane; c < end; c += kWarp) store_wide<T, kWide>(to + int64_t(c) * kWide, zeros);
      continue;
    }
    __syncwarp();
    for (uint32_t c = begin + lane; c < end; c += kFewColumns * kWarp) {
      float sums[kFewColumns][kWide] = {};
      for (uint32_t hit = 0; hit < hits; hit += kFewAhead) {
        Raw<T, kWide> raw[kFewAhead][kFewColumns];
        uint32_t from[kFewAhead];
#pragma unroll
        for (int u = 0; u < kFewAhead; ++u) {
          if (hit + u >= hits) continue;
          from[u] = list[hit + u];
#pragma unroll
          for (int v = 0; v < kFewColumns; ++v) {
            const int64_t at = int64_t(from[u]) * a.n + int64_t(c + v * kWarp) * kWide;
            if (c + v * kWarp < end) raw[u][v] = load_wide<T, kWide>(static_cast<const T*>(a.grad_out) + at);
          }
        }
#pragma unroll
        for (int u = 0; u < kFewAhead; ++u) {
          if (hit + u >= hits) continue;
#pragma unroll
          for (int v = 0; v < kFewColumns; ++v) {
            if (c + v * kWarp >= end) continue;
            float grad[kWide], multiplier[kWide];
            widen<T, kWide>(raw[u][v], grad);
            multipliers(a.dropout, seed, int64_t(from[u]) * a.n + int64_t(c + v * kWarp) * kWide, multiplier);
#pragma unroll
            for (int i = 0; i < kWide; ++i) sums[v][i] = fmaf(grad[i], multiplier[i], sums[v][i]);
          }
        }
      }
#pragma unroll
      for (int v = 0; v < kFewColumns; ++v) {
        if (c + v * kWarp < end) store_wide<T, kWide>(to + int64_t(c + v * kWarp) * kWide, sums[v]);
      }
    }
    __syncwarp();  // the list is read before it is written again
  }
}

}  // namespace fuseline
