// Products of a warpgroup (wgmma.cuh) 192 and 256 wide, both operands in shared memory as panels (wgmma_panels.cuh).
#pragma once

#include "wgmma_panels.cuh"

namespace fuseline {

#if FUSELINE_HAS_WGMMA
#define FUSELINE_SUMS_192 \
  FUSELINE_SUMS_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FUSELINE_SUMS_256 \
  FUSELINE_SUMS_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FUSELINE_TILES_4(i) FUSELINE_TILE(i), FUSELINE_TILE(i + 1), FUSELINE_TILE(i + 2), FUSELINE_TILE(i + 3)
#define FUSELINE_TILES_192 FUSELINE_TILES_128, FUSELINE_TILES_4(16), FUSELINE_TILES_4(20)
#define FUSELINE_TILES_256 FUSELINE_TILES_192, FUSELINE_TILES_4(24), FUSELINE_TILES_4(28)
#endif

// d[64, N] (+)= A * B, neither turned; `add` false sets d.
template <class T, int N>
__device__ __forceinline__ void wgmma_wide(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  constexpr bool kHalf = std::is_same_v<T, __half>, kTurned = false;
  static_assert(N == 128 || N == 192 || N == 256);
  if constexpr (N == 128) wgmma_shared<T, N, kTurned>(d, a, b, add);
  if constexpr (N == 192 && kHalf) FUSELINE_BOTH_SHARED(192, "f16", FUSELINE_SUMS_192, FUSELINE_TILES_192, 96, 97, 98, 99, 100);
  if constexpr (N == 192 && !kHalf) FUSELINE_BOTH_SHARED(192, "bf16", FUSELINE_SUMS_192, FUSELINE_TILES_192, 96, 97, 98, 99, 100);
  if constexpr (N == 256 && kHalf) FUSELINE_BOTH_SHARED(256, "f16", FUSELINE_SUMS_256, FUSELINE_TILES_256, 128, 129, 130, 131, 132);
  if constexpr (N == 256 && !kHalf) FUSELINE_BOTH_SHARED(256, "bf16", FUSELINE_SUMS_256, FUSELINE_TILES_256, 128, 129, 130, 131, 132);
#endif
}

}  // namespace fuseline
