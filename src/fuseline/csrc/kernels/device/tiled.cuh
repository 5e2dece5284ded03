// Short rows that do not keep to 16-byte steps: a block has as many neighbours of them as make whole vectors, brings
// them to shared memory in one bulk copy and sends them from there (sm_90). In between a thread takes single elements.
#pragma once

#include "../plans/tiles.h"
#include "overlap.cuh"
#include "waiting.cuh"

namespace fuseline {

template <class Arguments>
int launch_tiles(void (*kernel)(Arguments), const Arguments& a, const LaunchShape& shape, const Device& device, void* stream) {
  constexpr size_t kAnyKernel = 47 * 1024;  // what a block may have without asking
  int count = 0;
  if (shape.shared > kAnyKernel) {
    const cudaError_t error = resident_clusters(kernel, device, kTileBlock, shape.shared, 1, count);
    if (error != cudaSuccess) return int(error);
  }
  return launch(kernel, a, shape, device, stream);
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
