// Products of warpgroups over the chunks of chunk_product.cuh (wgmma, sm_90a): both operands are read from shared memory, as
// the bulk copies leave them there, once for 64 rows and not once for a warp's.
#pragma once

#include "device/chunk_product.cuh"
#include "device/wgmma.cuh"

namespace fuseline {

// Where an operand stands whose rows are the lines of a chunk: swizzled in 128 bytes, eight lines are 1,024. Steps of 32
// bytes along a line are added to the address.
__device__ __forceinline__ uint64_t chunk_operand(uint32_t shared) {
  constexpr uint64_t kEightRows = 1024 >> 4, kSwizzled = uint64_t(1) << 62, kOneStep = uint64_t(1) << 16;
  return uint64_t((shared & 0x3ffff) >> 4) | kOneStep | kEightRows << 32 | kSwizzled;
}

#if FUSELINE_HAS_WGMMA
#define FUSELINE_WGMMA_SHARED_64(shape, type, end) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n64" shape ".f32." type "." type " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "%32, %33, add, 1, 1" end ";\n}\n" \
      : FUSELINE_D32(0) \
      : "l"(a), "l"(b), "r"(int(add)))

#define FUSELINE_WGMMA_SHARED_96(shape, type, end) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %50, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n96" shape ".f32." type "." type " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, " \
      "%48, %49, add, 1, 1" end ";\n}\n" \
      : FUSELINE_D32(0), FUSELINE_D8(32), FUSELINE_D8(40) \
      : "l"(a), "l"(b), "r"(int(add)))
#endif

// d += A (64 rows) * B (N rows) over 32 bytes of k; with `add` false d is set.
template <class Math, int N>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  static_assert(N == 64 || N == 96);
  if constexpr (!kSixteen<Math>) {
    if constexpr (N == 64) FUSELINE_WGMMA_SHARED_64("k8", "tf32", "");
    if constexpr (N == 96) FUSELINE_WGMMA_SHARED_96("k8", "tf32", "");
  } else if constexpr (std::is_same_v<typename Math::Element, __half>) {
    if constexpr (N == 64) FUSELINE_WGMMA_SHARED_64("k16", "f16", ", 0, 0");
    if constexpr (N == 96) FUSELINE_WGMMA_SHARED_96("k16", "f16", ", 0, 0");
  } else {
    if constexpr (N == 64) FUSELINE_WGMMA_SHARED_64("k16", "bf16", ", 0, 0");
    if constexpr (N == 96) FUSELINE_WGMMA_SHARED_96("k16", "bf16", ", 0, 0");
  }
#endif
}

// As ChunkProduct, whose barriers, fetches and sums it has: a warp's sums are 16 rows of all columns. Two warpgroups have 64
// rows each of 128, or with two splits the same 64 and every other chunk.
template <class Math, int kRowsA, int kRowsB, int kSplits>
struct WarpgroupProduct : ChunkProduct<Math, kRowsA, kRowsB, 1, kRowsB / 8, kSplits> {
  using Chunks = ChunkProduct<Math, kRowsA, kRowsB, 1, kRowsB / 8, kSplits>;
  static_assert(kRowsA * kSplits == 128);

  template <class Fetch>
  static __device__ __forceinline__ void run(float (&sums)[1][kRowsB / 8][4], const ChunkRing& ring, const Fetch& fetch) {
    constexpr int kReaders = Chunks::kReaders;
    float(&d)[kRowsB / 2] = *reinterpret_cast<float(*)[kRowsB / 2]>(&sums);
    const int warp = Chunks::warp(), lane = threadIdx.x % kWarp;
    const uint32_t a = ring.stages_at + warp % kReaders / 4 * 64 * kChunkBytes, b = ring.stages_at + kRowsA * kChunkBytes;
    const auto refill = [&](int chunk, int stage, int parity) {
      if (chunk + ring.stages >= ring.chunks) return;
      if (lane == 0) {
        barrier_arrive(ring.empty + stage);
        if (warp % kReaders == 0) {
          barrier_wait(ring.empty + stage, parity);
          fetch(chunk + ring.stages, stage);
        }
      }
      __syncwarp();
    };
    int stage = warp / kReaders, parity = 0, last_stage = 0, last_parity = 0;
#pragma unroll 1
    for (int chunk = stage; chunk < ring.chunks; chunk += kSplits) {
      barrier_wait(ring.full + stage, parity);
      wgmma_fence();
      const uint64_t left = chunk_operand(a + stage * Chunks::kStage), right = chunk_operand(b + stage * Chunks::kStage);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma_shared<Math, kRowsB>(d, left + 2 * step, right + 2 * step, step > 0 || chunk >= kSplits);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk >= kSplits) refill(chunk - kSplits, last_stage, last_parity);
      last_stage = stage, last_parity = parity;
      stage += kSplits;
      if (stage >= ring.stages) stage -= ring.stages, parity ^= 1;
    }
    wgmma_wait<0>();
    if (kSplits > 1 && warp / kReaders >= ring.chunks) {
#pragma unroll
      for (int i = 0; i < kRowsB / 2; ++i) d[i] = 0.f;
    }
  }

  // Without splits: calls put(row, n, vector) with what 16 bytes of elements hold from (row, n) on, the four lanes that have
  // parts of them exchange these. finish(row, n, left, right) is called before with each pair of sums, to change them.
  template <class E, class Finish, class Put>
  static __device__ __forceinline__ void each_vector(const float (&sums)[1][kRowsB / 8][4], const Finish& finish,
                                                     const Put& put) {
    static_assert(kSplits == 1);
    constexpr int kTiles = 8 / int(sizeof(E));  // of 8 columns, which the four lanes exchange
    const int lane = threadIdx.x % kWarp, quad = lane % 4;
    const bool odd = lane % 2, upper = quad >= 2;
#pragma unroll
    for (int first = 0; first < kRowsB / 8; first += kTiles) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Chunks::warp() * 16 + lane / 4 + 8 * half;
        uint32_t words[4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float left = sums[0][first + t][2 * half], right = sums[0][first + t][2 * half + 1];
          finish(row, 8 * (first + t) + 2 * quad, left, right);
          if constexpr (sizeof(E) == 4) {
            words[2 * t] = __float_as_uint(left), words[2 * t + 1] = __float_as_uint(right);
          } else {
            words[t] = pack_pair<E>(left, right);
          }
        }
        // The lane beside has the other half of a pair of tiles, in 16 bits that one two lanes on the rest of them.
        constexpr int kNear = sizeof(E) == 4 ? 2 : 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int low = sizeof(E) == 4 ? i : 2 * i, high = low + kNear;
          const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? words[low] : words[high], 1);
          words[low] = odd ? got : words[low], words[high] = odd ? words[high] : got;
        }
        if constexpr (sizeof(E) == 2) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[2 + i], 2);
            words[i] = upper ? got : words[i], words[2 + i] = upper ? words[2 + i] : got;
          }
        }
        const int n = sizeof(E) == 4 ? 8 * (first + odd) + 4 * upper : 8 * (first + quad);
        put(row, n, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }
};

}  // namespace fuseline
