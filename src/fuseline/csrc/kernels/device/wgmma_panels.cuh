// Products of a warpgroup (wgmma.cuh) whose operands stand in shared memory as panels that chunks change places in: both of
// them, or B alone. One tile serves as the rows of a product and, turned, as its columns.
#pragma once

#include "wgmma.cuh"

namespace fuseline {

// kRows rows of kColumns 16-bit elements: panels of up to 64 columns, 128 bytes of a row, one behind another. The 16-byte
// chunks of a panel's row change places by the row's number, as the products undo it; a tile starts at a multiple of 1024.
template <int kColumns, int kRows>
struct Panels {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kPitch = kColumns < 64 ? kColumns * 2 : 128;  // bytes of a row of a panel
  static constexpr int kPanel = kRows * kPitch, kBytes = kColumns / (kPitch / 2) * kPanel;
  static_assert(kPitch == 64 || kPitch == 128);

  uint32_t base;  // in shared memory

  __device__ __forceinline__ uint32_t chunk(int row, int chunk) const {
    constexpr int kPlaces = kPitch / 16;
    return base + chunk / kPlaces * kPanel + row * kPitch + (chunk % kPlaces ^ row / (128 / kPitch) % kPlaces) * 16;
  }
  // From the address of one of the first two chunks of a row, that of an even number of chunks on.
  static __device__ __forceinline__ uint32_t chunks_on(uint32_t address, int chunks) {
    constexpr int kPlaces = kPitch / 16;
    return (address ^ chunks % kPlaces * 16) + chunks / kPlaces * kPanel;
  }

  // Rows from `row` on with columns 16 k .. + 16: A, or B whose columns of the product are these rows.
  __device__ __forceinline__ uint64_t rows(int row, int k) const {
    constexpr int kSteps = kPitch / 32;  // of 16 columns, to a panel
    return operand(base + row * kPitch + k / kSteps * kPanel + k % kSteps * 32);
  }
  // The same turned: columns from the first of `panel` on with rows 16 k .. + 16.
  __device__ __forceinline__ uint64_t columns(int panel, int k) const {
    return operand(base + panel * kPanel + k * 16 * kPitch);
  }

 private:
  static __device__ __forceinline__ uint64_t operand(uint32_t address) {
    constexpr uint64_t kEightRows = 8 * kPitch, kSwizzle = kPitch == 128 ? 1 : 2;
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(kPanel >> 4) << 16 | (kEightRows >> 4) << 32 | kSwizzle << 62;
  }
};

// Sums that a product has written are read behind this, not before: what waits does not name them.
template <int kTiles>
__device__ __forceinline__ void hold(float (&sums)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])::"memory");
  }
}

#if FUSELINE_HAS_WGMMA
#define FUSELINE_SUMS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FUSELINE_SUMS_64 \
  FUSELINE_SUMS_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FUSELINE_SUMS_128 \
  FUSELINE_SUMS_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FUSELINE_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FUSELINE_TILES_32 FUSELINE_TILE(0), FUSELINE_TILE(1), FUSELINE_TILE(2), FUSELINE_TILE(3)
#define FUSELINE_TILES_64 FUSELINE_TILES_32, FUSELINE_TILE(4), FUSELINE_TILE(5), FUSELINE_TILE(6), FUSELINE_TILE(7)
#define FUSELINE_TILES_128 \
  FUSELINE_TILES_64, FUSELINE_TILE(8), FUSELINE_TILE(9), FUSELINE_TILE(10), FUSELINE_TILE(11), FUSELINE_TILE(12), \
      FUSELINE_TILE(13), FUSELINE_TILE(14), FUSELINE_TILE(15)

// i0 .. i4: the numbers of the arguments behind the sums.
#define FUSELINE_BOTH_SHARED(n, type, sums, tiles, i0, i1, i2, i3, i4) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %" #i2 ", 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" sums "}, %" #i0 ", %" #i1 \
      ", add, 1, 1, %" #i3 ", %" #i4 ";\n}\n" \
      : tiles \
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTurned)), "n"(int(kTurned)))
#define FUSELINE_A_HELD(n, type, sums, tiles, i0, i1, i2, i3, i4, i5) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %" #i5 ", 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" sums "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 \
      "}, %" #i4 ", add, 1, 1, 1;\n}\n" \
      : tiles \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
#endif

// d[64, N] (+)= A * B, both in shared memory, and both turned or none; `add` false sets d.
template <class T, int N, bool kTurned>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(N == 32 || N == 64 || N == 128);
  if constexpr (N == 32 && kHalf) FUSELINE_BOTH_SHARED(32, "f16", FUSELINE_SUMS_32, FUSELINE_TILES_32, 16, 17, 18, 19, 20);
  if constexpr (N == 32 && !kHalf) FUSELINE_BOTH_SHARED(32, "bf16", FUSELINE_SUMS_32, FUSELINE_TILES_32, 16, 17, 18, 19, 20);
  if constexpr (N == 64 && kHalf) FUSELINE_BOTH_SHARED(64, "f16", FUSELINE_SUMS_64, FUSELINE_TILES_64, 32, 33, 34, 35, 36);
  if constexpr (N == 64 && !kHalf) FUSELINE_BOTH_SHARED(64, "bf16", FUSELINE_SUMS_64, FUSELINE_TILES_64, 32, 33, 34, 35, 36);
  if constexpr (N == 128 && kHalf) FUSELINE_BOTH_SHARED(128, "f16", FUSELINE_SUMS_128, FUSELINE_TILES_128, 64, 65, 66, 67, 68);
  if constexpr (N == 128 && !kHalf) FUSELINE_BOTH_SHARED(128, "bf16", FUSELINE_SUMS_128, FUSELINE_TILES_128, 64, 65, 66, 67, 68);
#endif
}

// d[64, N] (+)= A * B, A in registers, B in shared memory and turned.
template <class T, int N>
__device__ __forceinline__ void wgmma_held(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(N == 32 || N == 64 || N == 128);
  if constexpr (N == 32 && kHalf) FUSELINE_A_HELD(32, "f16", FUSELINE_SUMS_32, FUSELINE_TILES_32, 16, 17, 18, 19, 20, 21);
  if constexpr (N == 32 && !kHalf) FUSELINE_A_HELD(32, "bf16", FUSELINE_SUMS_32, FUSELINE_TILES_32, 16, 17, 18, 19, 20, 21);
  if constexpr (N == 64 && kHalf) FUSELINE_A_HELD(64, "f16", FUSELINE_SUMS_64, FUSELINE_TILES_64, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 64 && !kHalf) FUSELINE_A_HELD(64, "bf16", FUSELINE_SUMS_64, FUSELINE_TILES_64, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 128 && kHalf) FUSELINE_A_HELD(128, "f16", FUSELINE_SUMS_128, FUSELINE_TILES_128, 64, 65, 66, 67, 68, 69);
  if constexpr (N == 128 && !kHalf) FUSELINE_A_HELD(128, "bf16", FUSELINE_SUMS_128, FUSELINE_TILES_128, 64, 65, 66, 67, 68, 69);
#endif
}

}  // namespace fuseline
