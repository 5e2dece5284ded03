// Products of a warpgroup (wgmma, sm_90a): D[64 x N] += A[64 x 16] * B[16 x N], A in registers, B in shared memory.
//
// Warp i of the four has rows 16 i .. of A and D, and of these each lane what it has of mma.m16n8k16 (mma.cuh): A in four
// words, D as N / 8 blocks of 16 x 8, four floats of each. B stands as it is read without a swizzle: 16 bytes are eight
// columns of k of one of N's rows, eight such rows one after the other (128 bytes), these for all rows; then the same for
// the next eight columns of k, `k_step` bytes on. What threads have stored there they show first (`show_to_copies`).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fuseline {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FUSELINE_HAS_WGMMA 1
#else
#define FUSELINE_HAS_WGMMA 0
#endif

// Registers written before are seen by the products that follow.
__device__ __forceinline__ void wgmma_fence() {
#if FUSELINE_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#if FUSELINE_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the `kPending` youngest groups of products are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#if FUSELINE_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Where B stands; all in bytes, multiples of 16. The upper bits of a shared address are the block's place in its cluster.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t shared, uint32_t k_step) {
  constexpr uint64_t kRowStep = 128;  // to the next eight rows
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(k_step >> 4) << 16 | (kRowStep >> 4) << 32;
}

// A warpgroup takes registers that another one of its block gives back; multiples of 8.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if FUSELINE_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if FUSELINE_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// With `add` false D is set.
template <class T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add);

#if FUSELINE_HAS_WGMMA
#define FUSELINE_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FUSELINE_D32(i) FUSELINE_D8(i), FUSELINE_D8(i + 8), FUSELINE_D8(i + 16), FUSELINE_D8(i + 24)

#define FUSELINE_WGMMA_32(type) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %21, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
      "{%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}\n" \
      : FUSELINE_D8(0), FUSELINE_D8(8) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))

#define FUSELINE_WGMMA_64(type) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %37, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}\n" \
      : FUSELINE_D32(0) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))

#define FUSELINE_WGMMA_128(type) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %69, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
      "%59, %60, %61, %62, %63}, " \
      "{%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}\n" \
      : FUSELINE_D32(0), FUSELINE_D32(32) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))

#define FUSELINE_WGMMA_256(type) \
  asm volatile( \
      "{\n .reg .pred add;\n setp.ne.b32 add, %133, 0;\n" \
      " wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
      "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, " \
      "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, " \
      "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
      "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
      "{%128, %129, %130, %131}, %132, add, 1, 1, 0;\n}\n" \
      : FUSELINE_D32(0), FUSELINE_D32(32), FUSELINE_D32(64), FUSELINE_D32(96) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))

#endif

template <class T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
#if FUSELINE_HAS_WGMMA
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>);
  static_assert(N == 32 || N == 64 || N == 128 || N == 256);
  if constexpr (N == 32 && kHalf) FUSELINE_WGMMA_32("f16");
  if constexpr (N == 32 && !kHalf) FUSELINE_WGMMA_32("bf16");
  if constexpr (N == 64 && kHalf) FUSELINE_WGMMA_64("f16");
  if constexpr (N == 64 && !kHalf) FUSELINE_WGMMA_64("bf16");
  if constexpr (N == 128 && kHalf) FUSELINE_WGMMA_128("f16");
  if constexpr (N == 128 && !kHalf) FUSELINE_WGMMA_128("bf16");
  if constexpr (N == 256 && kHalf) FUSELINE_WGMMA_256("f16");
  if constexpr (N == 256 && !kHalf) FUSELINE_WGMMA_256("bf16");
#endif
}

}  // namespace fuseline
