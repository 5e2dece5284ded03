// Products of a block whose operands come in chunks of 128 bytes of k by bulk tensor copies, for layers that take a few
// microseconds: nearly all lines are on their way before the first is used, and warps share the steps of k where there are
// too few sums for all of them.
//
// A chunk of an operand lies in shared memory as the copy leaves it: a line of 128 bytes for each row, the 16-byte pieces of
// line r in the places piece ^ (r % 8).
#pragma once

#include <cuda.h>

#include <algorithm>

#include "meeting.cuh"
#include "tensor_boxes.cuh"
#include "tile_product.cuh"

namespace fuseline {

constexpr int kChunkBytes = 128;
constexpr int kMostChunks = 16;
constexpr int kWarps = kTileThreads / kWarp;

// As cluster_arrive, but what was stored before need not be seen by the others.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

__device__ __forceinline__ void load_matrices_at(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ float4 load_four_at(uint32_t at) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(at)
               : "memory");
  return four;
}

__device__ __forceinline__ float dot(float sum, float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// sums[i][j] += A (16 rows from 16 i) * B (8 rows from 8 j) over one chunk; `a` and `b` are where the warp's first rows lie.
template <class Math, int kTall, int kWide>
__device__ __forceinline__ void multiply_chunk(float (&sums)[kTall][kWide][4], uint32_t a, uint32_t b) {
  static_assert(kWide % 2 == 0 || std::is_same_v<Math, Exact>);
  const int lane = threadIdx.x % kWarp, turn = lane % 8;
  if constexpr (std::is_same_v<Math, Exact>) {
    const int group = lane / 4, quad = lane % 4;
    a += group * kChunkBytes, b += 2 * quad * kChunkBytes;
#pragma unroll 2
    for (int piece = 0; piece < 8; ++piece) {
      float4 left[kTall][2];
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          left[i][half] = load_four_at(a + (16 * i + 8 * half) * kChunkBytes + ((piece ^ group) << 4));
        }
      }
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        const float4 even = load_four_at(b + 8 * j * kChunkBytes + ((piece ^ (2 * quad)) << 4));
        const float4 odd = load_four_at(b + (8 * j + 1) * kChunkBytes + ((piece ^ (2 * quad + 1)) << 4));
#pragma unroll
        for (int i = 0; i < kTall; ++i) {
#pragma unroll
          for (int w = 0; w < 4; ++w) sums[i][j][w] = dot(sums[i][j][w], left[i][w / 2], w % 2 ? odd : even);
        }
      }
    }
  } else {
    // In TF32 an 8 x 8 matrix of 16-bit elements is one of 8 rows x 4 elements, and lies in the registers as those want it,
    // rounded by the copy that brought it.
    const uint32_t from_a = a + lane % 16 * kChunkBytes, from_b = b + (turn + lane / 16 * 8) * kChunkBytes;
    const uint32_t at_a = uint32_t((lane / 16) ^ turn) << 4, at_b = uint32_t((lane / 8 % 2) ^ turn) << 4;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t left[kTall][4];
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
        load_matrices_at(left[i], from_a + 16 * i * kChunkBytes + (at_a ^ (step << 5)));
      }
#pragma unroll
      for (int j = 0; j < kWide; j += 2) {
        uint32_t right[4];
        load_matrices_at(right, from_b + 8 * j * kChunkBytes + (at_b ^ (step << 5)));
#pragma unroll
        for (int i = 0; i < kTall; ++i) {
          if constexpr (kSixteen<Math>) {
            mma_16816<typename Math::Element>(sums[i][j], left[i], right[0], right[1]);
            mma_16816<typename Math::Element>(sums[i][j + 1], left[i], right[2], right[3]);
          } else {
            mma_1688_tf32(sums[i][j], left[i], right[0], right[1]);
            mma_1688_tf32(sums[i][j + 1], left[i], right[2], right[3]);
          }
        }
      }
    }
  }
}

// The ring of chunks of a block, its barriers behind each other in shared memory.
struct ChunkRing {
  uint32_t stages_at;
  uint64_t *full, *empty;
  int stages, chunks;
};

// A warp has 16 * kTall rows of A and 8 * kWide of B; kSplits warps have the same and share the chunks.
template <class Math, int kRowsA, int kRowsB, int kTall, int kWide, int kSplits>
struct ChunkProduct {
  using Arithmetic = Math;
  using Element = typename Math::Element;
  using Sums = float[kTall][kWide][4];
  static constexpr int kRows = kRowsA, kColumns = kRowsB, kSplitsOfChunks = kSplits;
  static constexpr int kDown = kRowsA / (16 * kTall), kAcross = kRowsB / (8 * kWide);
  static constexpr int kReaders = kDown * kAcross;  // warps that read a chunk
  static_assert(kReaders * kSplits == kWarps);
  static constexpr int kStage = (kRowsA + kRowsB) * kChunkBytes;
  static constexpr int kPitch = kRowsB + 8;  // of sums on their way through shared memory
  static constexpr int kSumBytes = kSplits * kRowsA * kPitch * 4;

  // Stages of the ring for `chunks`, where there is `room` for so many bytes. A stage that is used again is read by the same
  // warps each time: others could wait for its second chunk before the first has come, and take the barrier of that for open.
  static int stages(int chunks, int64_t room) {
    const int most = int(std::min<int64_t>(kMostChunks, room / kStage));
    return chunks <= most ? chunks : most - most % kSplits;
  }

  static __device__ __forceinline__ int warp() { return int(threadIdx.x) / kWarp; }
  static __device__ __forceinline__ int row() { return warp() % kReaders / kAcross * 16 * kTall; }
  static __device__ __forceinline__ int column() { return warp() % kAcross * 8 * kWide; }

  // By one thread a stage, before the block meets for the first time.
  static __device__ __forceinline__ void begin(const ChunkRing& ring) {
    if (int(threadIdx.x) < ring.stages) {
      barrier_init(ring.full + threadIdx.x, 1);
      barrier_init(ring.empty + threadIdx.x, kReaders);
      publish_barriers();
    }
  }

  // Calls fetch(chunk, stage) for the chunks that this thread is to ask for at the beginning.
  template <class Fetch>
  static __device__ __forceinline__ void fetch_first(const ChunkRing& ring, const Fetch& fetch) {
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll 1
    for (int chunk = warp(); chunk < min(ring.stages, ring.chunks); chunk += kWarps) fetch(chunk, chunk);
  }

  // Sets the sums; `fetch` as above, for the chunks that have to wait for a stage.
  template <class Fetch>
  static __device__ __forceinline__ void run(float (&sums)[kTall][kWide][4], const ChunkRing& ring, const Fetch& fetch) {
    const int lane = threadIdx.x % kWarp;
    const uint32_t a = ring.stages_at + row() * kChunkBytes;
    const uint32_t b = ring.stages_at + (kRowsA + column()) * kChunkBytes;
    int stage = warp() / kReaders, parity = 0;
#pragma unroll
    for (int i = 0; i < kTall * kWide * 4; ++i) sums[i / (4 * kWide)][i / 4 % kWide][i % 4] = 0.f;
#pragma unroll 1
    for (int chunk = stage; chunk < ring.chunks; chunk += kSplits) {
      barrier_wait(ring.full + stage, parity);
      multiply_chunk<Math>(sums, a + stage * kStage, b + stage * kStage);
      if (chunk + ring.stages < ring.chunks) {
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(ring.empty + stage);
          if (warp() % kReaders == 0) {
            barrier_wait(ring.empty + stage, parity);
            fetch(chunk + ring.stages, stage);
          }
        }
        __syncwarp();
      }
      stage += kSplits;
      if (stage >= ring.stages) stage -= ring.stages, parity ^= 1;
    }
  }

  // Puts the sums where eight of them may be had by take(). All warps have to have done with what lies there.
  static __device__ __forceinline__ void put(float* to, const float (&sums)[kTall][kWide][4]) {
    to += warp() / kReaders * kRowsA * kPitch;
    each_pair(sums, row(), column(), [&](int r, int n, float left, float right) {
      *reinterpret_cast<float2*>(to + r * kPitch + n) = make_float2(left, right);
    });
  }
  static __device__ __forceinline__ void take(const float* from, int r, int n, float (&eight)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = 0.f;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) {
      const float4* const at = reinterpret_cast<const float4*>(from + (split * kRowsA + r) * kPitch + n);
      const float4 low = at[0], high = at[1];
      eight[0] += low.x, eight[1] += low.y, eight[2] += low.z, eight[3] += low.w;
      eight[4] += high.x, eight[5] += high.y, eight[6] += high.z, eight[7] += high.w;
    }
  }
};

// Eight elements in one vector or two.
template <class E>
__device__ __forceinline__ void pack_eight(const float (&values)[8], uint4 (&vectors)[sizeof(E) / 2]) {
  constexpr int kSize = 16 / int(sizeof(E));
#pragma unroll
  for (int v = 0; v < int(sizeof(E) / 2); ++v) {
    float part[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) part[i] = values[v * kSize + i];
    vectors[v] = pack<E>(part);
  }
}

}  // namespace fuseline
