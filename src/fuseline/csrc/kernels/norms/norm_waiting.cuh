// Long rows of the norms' forward, which wait in shared memory until their moments have met, with blocks that end with
// them. Each thread copies exactly the vectors that it will read, of all tensors, all at once, and takes them piece by
// piece as they arrive.
#pragma once

#include "device/launch.cuh"
#include "device/ring.cuh"

namespace fuseline {

constexpr int kPiece = 4;   // vectors a thread takes at a time
constexpr int kPieces = 8;  // of them that a thread has in shared memory at most

// How many threads of how many blocks share a row, 0 if none can hold it.
struct NormWaiting {
  int cluster, threads;
};

// For rows of `bytes` bytes in shared memory; `beside` is what a block has besides.
inline NormWaiting plan_norm_waiting(int64_t bytes, int64_t beside, const Device& device) {
  NormWaiting plan{1, 0};
  beside += 1024;  // the system's part
  const int64_t vectors = divide_up(bytes, 16);
  const auto blocks_for = [&] {
    const int64_t part = divide_up(vectors, plan.cluster) * 16;
    return part > device.shared_a_block - beside ? int64_t(0) : device.shared_a_processor / (part + beside);
  };
  while (device.clusters && plan.cluster < kMaxCluster && blocks_for() < 2) plan.cluster *= 2;
  const int64_t blocks = std::min<int64_t>(blocks_for(), 8);
  if (blocks == 0) return plan;
  const int64_t each = divide_up(vectors, plan.cluster);
  plan.threads = int(std::min<int64_t>(kMostThreads, 1024 / blocks / kWarp * kWarp));
  plan.threads = int(std::min<int64_t>(plan.threads, std::max<int64_t>(2 * kWarp, divide_up(each, kWarp) * kWarp)));
  if (each > int64_t(plan.threads) * kPiece * kPieces) plan.threads = 0;
  return plan;
}

// The part of block `rank` of a row of n elements, neighbouring vectors: the first of this thread, and the end of all.
template <class T>
__device__ __forceinline__ void divide_row(const T* row, int n, int rank, int blocks, int lane, int& begin, int& end) {
  constexpr int kSize = kVector<T>;
  const int head = elements_into_vector(row);
  const int each = ((n + head + kSize - 1) / kSize + blocks - 1) / blocks;
  begin = (rank * each + lane) * kSize - head;
  end = min((rank + 1) * each * kSize - head, n);
}

// The next piece, once it has arrived: with one more group of copies each time, an empty one, it has when all but the
// last kPieces groups have.
__device__ __forceinline__ void wait_for_piece(const uint4* slots, int threads, int first, int end, int step,
                                               uint4 (&raw)[kPiece]) {
  commit_copies();
  asm volatile("cp.async.wait_group %0;" ::"n"(kPieces) : "memory");
#pragma unroll
  for (int k = 0; k < kPiece; ++k) {
    raw[k] = first + k * step < end ? slots[k * threads] : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace fuseline
