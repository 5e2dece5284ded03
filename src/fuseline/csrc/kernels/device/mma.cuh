// Tensor-core products of one warp, and the loads that feed them (sm_80 and later).
//
// One product is D[16 x 8] += A[16 x K] * B[K x 8], K = 16 for 16-bit elements and 8 for TF32. Who holds what, with
// group = lane / 4 and quad = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16" and "mma.m16n8k8"):
//   D: d[0], d[1] are row group, columns 2 * quad, + 1; d[2], d[3] the same of row group + 8.
//   A, 16 bits: a[0] row group, columns 2 * quad, + 1; a[1] row group + 8; a[2], a[3] the same, columns + 8.
//   B, 16 bits: b[0] rows 2 * quad, + 1 of column group; b[1] rows + 8.
//   A, TF32: a[0] row group, column quad; a[1] row group + 8; a[2], a[3] the same, column + 4.
//   B, TF32: b[0] row quad of column group; b[1] row + 4.
// The D of one product, packed to 16 bits, is the A of the next: its columns 16 i .. 16 i + 15 are two D side by side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fuseline {

// D += A * B, elements of T (fp16 or bf16), sums in fp32.
template <class T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// D += A * B, elements rounded to TF32 (`to_tf32`), sums in fp32.
__device__ __forceinline__ void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane i names row i % 8 of matrix i / 8 (16 bytes,
// 16-byte aligned), and receives in word m elements 2 * quad, + 1 of row `group` of matrix m.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// The same, each matrix transposed: word m holds elements `group` of rows 2 * quad, + 1 of matrix m.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

}  // namespace fuseline
