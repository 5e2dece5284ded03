// How x comes to the products of linear_tiles.cuh: step by step, in a ring of shared memory.
#pragma once

#include "linear_tiles_work.cuh"
#include "device/meeting.cuh"
#include "device/waiting.cuh"

namespace fuseline {

// Stages of x, full and empty in turn.
template <int kStages>
struct Stages {
  uint64_t full[kStages], empty[kStages];
};

// Where in the ring somebody is.
template <int kStages>
struct Place {
  int slot = 0, phase = 0;

  __device__ __forceinline__ void next() {
    if (++slot == kStages) slot = 0, phase ^= 1;
  }
};

// A warpgroup brings x as it stands and puts it in order (linear_tiles_order.cuh): each thread what it fetched itself, some
// steps before, eight columns of every eighth row.
template <class Shape, int kRows, bool kInCluster>
__device__ __forceinline__ void order_x(const LinearArguments& a, char* shared, Stages<Shape::kStages>& stages) {
  constexpr int kVectors = kRows / 8, kTogether = 2;  // of 16 bytes, of a thread and step
  const Run run = own_run<kInCluster>(a);
  const int thread = int(threadIdx.x) - Shape::kMultipliers, half = thread / kWarp, row = thread % kWarp / 4, quad = thread % 4;
  const uint32_t ring = shared_address(shared), unordered = ring + Shape::kStages * Shape::kStageBytes + thread * 16;
  const uint32_t to = ring + half / 2 * (kRows * 128) + (half % 2 * 4 * kRows + row) * 16 + quad * 4;
  const char* const x = a.x + row * a.x_stride + (half * 32 + quad * 8) * 2;
  Place<Shape::kUnordered> fetched, taken;
  int step = run.first % a.steps;
  const auto fetch = [&](int at) {
    if (at < run.end) {
      const bool inside = step * (kStepChunks * kTileColumns) + half * 32 + quad * 8 < a.k;
      const char* from = x + step * (kStepChunks * kTileColumns * 2);
#pragma unroll
      for (int v = 0; v < kVectors; ++v, from += 8 * a.x_stride) {  // of rows past the last nobody reads the sums
        const uint32_t room = unordered + fetched.slot * Shape::kStageBytes + v * (4 * kWarp * 16);
        if (row + 8 * v < a.m) copy_async(room, inside ? from : a.x, inside ? 16 : 0);
      }
      fetched.next();
      if (++step == a.steps) step = 0;
    }
    commit_copies();
  };
#pragma unroll
  for (int ahead = 0; ahead + 1 < Shape::kUnordered; ++ahead) fetch(run.first + ahead);
  Place<Shape::kStages> place;
  for (int at = run.first; at < run.end; ++at) {
    fetch(at + Shape::kUnordered - 1);
    wait_for_copies<Shape::kUnordered - 1>();
    barrier_wait(&stages.empty[place.slot], place.phase ^ 1);
#pragma unroll
    for (int first = 0; first < kVectors; first += kTogether) {
      uint4 raw[kTogether];
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        raw[v] = load_shared(unordered + taken.slot * Shape::kStageBytes + (first + v) * (4 * kWarp * 16));
      }
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        const uint32_t words[4] = {raw[v].x, raw[v].y, raw[v].z, raw[v].w};
        const uint32_t of = to + place.slot * Shape::kStageBytes + (first + v) * 128;
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared_word(of + i * (kRows * 16), words[i]);
      }
    }
    show_to_copies();  // and to products
    __syncwarp();
    if (thread % kWarp == 0) barrier_arrive(&stages.full[place.slot]);
    taken.next(), place.next();
  }
}

// One thread brings what is in order already.
template <class Shape, bool kInCluster>
__device__ __forceinline__ void bring_x(const LinearArguments& a, char* ring, Stages<Shape::kStages>& stages, int row_blocks) {
  const Run run = own_run<kInCluster>(a);
  Place<Shape::kStages> place;
  int tile = run.first / a.steps, step = run.first % a.steps;
  for (int at = run.first; at < run.end; ++at) {
    const char* const from = a.workspace + (int64_t(tile % row_blocks) * a.steps + step) * Shape::kStageBytes;
    barrier_wait(&stages.empty[place.slot], place.phase ^ 1);
    barrier_expect(&stages.full[place.slot], Shape::kStageBytes);
    copy_in(ring + place.slot * Shape::kStageBytes, from, Shape::kStageBytes, &stages.full[place.slot]);
    place.next();
    if (++step == a.steps) step = 0, ++tile;
  }
}

}  // namespace fuseline
