// Short rows that do not keep to 16-byte steps: a block has as many neighbours of them as make whole vectors, brings
// them to shared memory in one bulk copy and sends them from there (sm_90). In between a thread takes single elements.
#pragma once

#include "overlap.cuh"
#include "waiting.cuh"

namespace fuseline {

constexpr int kTileBlock = 256;
constexpr int kTileBytes = 16384;
constexpr int kLongestTiled = 1024;

// Elements of a row that a thread has at most.
constexpr int kFewTiled = 8, kManyTiled = 32;

struct Tiling {
  int threads = 0;  // of a row; 0: such rows are not tiled
  int rows = 0;     // of a block
  size_t bytes = 0;
  int64_t grid = 0;
};

// `offsets`: of all tensors into their 16 bytes, together.
template <class T>
Tiling plan_tiles(int64_t rows, int64_t n, int offsets, int tensors, const Device& device) {
  Tiling plan;
  if (!device.clusters || n > kLongestTiled || n % kVector<T> == 0 || offsets != 0) return plan;
  const int each = n <= kWarp * kFewTiled ? kFewTiled : kManyTiled;
  plan.threads = power_of_two_from(divide_up(n, each));
  const int at_once = kTileBlock / plan.threads;  // 8 and more: whole vectors
  const int64_t room = kTileBytes / (at_once * n * int64_t(sizeof(T)));
  const int64_t spread = rows / (int64_t(at_once) * 4 * device.processors);
  plan.rows = at_once * int(std::max<int64_t>(1, std::min(room, spread)));
  plan.bytes = size_t(divide_up(plan.rows * n * int64_t(sizeof(T)), 16) * 16 * tensors);
  plan.grid = divide_up(rows, plan.rows);
  return plan;
}

// Rows of whole vectors, more than a warp has lanes, that do not end with the lines of the cache: a warp that reads and
// writes them touches a line more at each step, a block that brings neighbours of them at once only at its ends. Few rows
// are not worth it. Softmax forward, share of the copy bandwidth by blocks of 8, 16, 24 rows: of 2,000 bytes 0.979, 0.967,
// 0.961; of 4,000 0.972, 0.958, 0.957; of 1,200 0.895, 0.975, 0.968.
template <class T>
Tiling plan_vector_tiles(int64_t rows, int64_t n, int most_held, int tensors, const Device& device) {
  Tiling plan;
  constexpr int kLine = 128, kWideRow = 1920, kFewRows = 128;
  const int64_t bytes = n * int64_t(sizeof(T)), vectors = bytes / 16;
  if (!device.clusters || bytes % kLine == 0 || vectors <= kWarp || vectors > most_held * kWarp) return plan;
  if (rows < int64_t(kFewRows) * device.processors) return plan;
  plan.threads = kWarp, plan.rows = bytes < kWideRow ? 16 : 8;
  plan.bytes = size_t(plan.rows * bytes * tensors);
  plan.grid = divide_up(rows, plan.rows);
  return plan;
}

template <class Arguments>
int launch_tiles(void (*kernel)(Arguments), const Arguments& a, const Tiling& plan, const Device& device, void* stream,
                 bool early = false) {
  constexpr size_t kAnyKernel = 47 * 1024;  // what a block may have without asking
  int count = 0;
  if (plan.bytes > kAnyKernel) {
    const cudaError_t error = resident_clusters(kernel, device, kTileBlock, plan.bytes, 1, count);
    if (error != cudaSuccess) return int(error);
  }
  return launch(kernel, a, plan.grid, dim3(plan.threads, kTileBlock / plan.threads), plan.bytes, 1, stream, early);
}

// The rows of a block of one tensor.
template <class T>
struct Tile {
  T* shared;
  int elements;  // of all its rows
  int whole;     // of which these fill vectors

  __device__ __forceinline__ Tile(uint4* at, int rows, int n)
      : shared(reinterpret_cast<T*>(at)), elements(rows * n), whole(elements / kVector<T> * kVector<T>) {}

  // One thread sends for it, and all bring what fills no vector: it is there once `arrived` and a barrier are through.
  __device__ __forceinline__ void fetch(const T* from, uint64_t* arrived) const {
    if (threadIdx.x + threadIdx.y == 0) {
      barrier_expect(arrived, whole * int(sizeof(T)));
      if (whole > 0) copy_in(shared, from, whole * int(sizeof(T)), arrived);
    }
    const int at = whole + int(threadIdx.y * blockDim.x + threadIdx.x);
    if (at < elements) shared[at] = from[at];
  }

  // All rows of a kernel that takes one tensor, before it does anything else. `arrived` is used for nothing besides.
  __device__ __forceinline__ void bring(const T* from, uint64_t* arrived) const {
    if (threadIdx.x + threadIdx.y == 0) barrier_init(arrived, 1), publish_barriers();
    __syncwarp();
    let_next_start();
    wait_for_earlier();
    fetch(from, arrived);
    __syncthreads();
    barrier_wait(arrived, 0);
  }

  // After a barrier of threads that have shown their stores to the copies.
  __device__ __forceinline__ void send(T* to) const {
    const int at = whole + int(threadIdx.y * blockDim.x + threadIdx.x);
    if (at < elements) to[at] = shared[at];
    if (threadIdx.x + threadIdx.y > 0) return;
    if (whole > 0) copy_out(to, shared, whole * int(sizeof(T)));
    wait_for_copies_out();
  }
};

}  // namespace fuseline
