// Products of a warpgroup (wgmma.cuh) 192 wide, both operands in shared memory as panels (wgmma_panels.cuh), turned or not.
#pragma once

#include "wgmma_panels.cuh"

namespace fuseline {

#if FUSELINE_HAS_WGMMA
#define FUSELINE_SUMS_192 \
  FUSELINE_SUMS_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FUSELINE_TILES_4(i) FUSELINE_TILE(i), FUSELINE_TILE(i + 1), FUSELINE_TILE(i + 2), FUSELINE_TILE(i + 3)
#define FUSELINE_PRODUCT_192(type) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %98, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {" FUSELINE_SUMS_192 "}, %96, %97" \
      ", add, 1, 1, %99, %100;\n}\n" \
      : FUSELINE_TILES_128, FUSELINE_TILES_4(16), FUSELINE_TILES_4(20) \
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTurnA)), "n"(int(kTurnB)))
#endif

// d[64, 192] (+)= A * B; `add` false sets d. A turned lies [16, 64], B turned [16, 192], else [64, 16] and [192, 16].
template <class T, bool kTurnA, bool kTurnB>
__device__ __forceinline__ void wgmma_192(float (&d)[24][4], uint64_t a, uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  if constexpr (std::is_same_v<T, __half>) FUSELINE_PRODUCT_192("f16");
  if constexpr (!std::is_same_v<T, __half>) FUSELINE_PRODUCT_192("bf16");
#endif
}

}  // namespace fuseline
