// What the kernel of one decoding step of attention is told, and the keys and values that it reads and writes.
#pragma once

#include <cuda_fp8.h>

#include "device/launch.cuh"
#include "device/vector.cuh"
#include "plans/decode_attention.h"

namespace fuseline {

constexpr int kAhead = 4;       // keys and values under way, a lane

struct DecodeArguments {
  const char* qkv;
  char* y;
  char* k;
  char* v;
  float* k_scales;
  float* v_scales;
  const int64_t* lengths;
  const float* cos;
  const float* sin;
  const char* q_norm;
  const char* k_norm;
  float* partials;
  int* arrivals;
  int64_t qkv_stride, batch_stride, head_stride, scale_batch_stride, scale_head_stride;
  int heads, kv_heads, group, parts;  // query heads to a key head, and blocks that have them
  int window, splits;
  float eps, scale;  // scale times log2(e)
  bool fp8;
  bool clustered;  // blocks that share a context are a cluster
};

__device__ __forceinline__ float from_byte(uint32_t byte, bool fp8) {
  if (!fp8) return float(int8_t(byte));
  __nv_fp8_e4m3 value;
  value.__x = __nv_fp8_storage_t(byte);
  return float(value);
}

__device__ __forceinline__ uint32_t to_byte(float value, bool fp8) {
  if (fp8) return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return uint32_t(max(-127, min(127, __float2int_rn(value)))) & 0xffu;
}

// What a lane holds of a key or value: 16 bytes of T, or 8 elements of 8 bits.
template <class T, bool kByte>
struct Piece {
  static constexpr int kElements = kByte ? 8 : kVector<T>;
  using Raw = std::conditional_t<kByte, uint2, uint4>;
  static constexpr int kBytes = kByte ? 1 : int(sizeof(T));

  static __device__ __forceinline__ void widen(const Raw& raw, float (&x)[kElements], bool fp8) {
    if constexpr (kByte) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = from_byte((i < 4 ? raw.x : raw.y) >> (8 * (i % 4)) & 0xffu, fp8);
    } else {
      unpack<T>(raw, x);
    }
  }
};

}  // namespace fuseline
