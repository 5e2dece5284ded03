// Elements of fp32, fp16 and bf16 in memory: 16-byte accesses where the address allows, single elements where
// it does not, and fp32 in registers.
//
// A row that starts at any address is seen as a run of 16-byte vectors of memory: vector v holds the elements
// v * kVector - head .. + kVector of the row, head being how far into its vector the row starts. Only the first
// and the last vector can be partly outside the row, and only those are touched element by element. So a row of
// 50257 bf16 elements still moves in 16-byte accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../fuseline_kernels.h"

namespace fuseline {

// Elements in one 16-byte access.
template <class T>
constexpr int kVector = 16 / int(sizeof(T));

constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) return value;
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
}

// Reads one element of a fuseline_dtype.
__device__ __forceinline__ float load_as(const void* from, int dtype, int64_t at) {
  if (dtype == FUSELINE_FLOAT32) return static_cast<const float*>(from)[at];
  if (dtype == FUSELINE_BFLOAT16) return to_float(static_cast<const __nv_bfloat16*>(from)[at]);
  return to_float(static_cast<const __half*>(from)[at]);
}

// Writes one element of a fuseline_dtype.
__device__ __forceinline__ void store_as(void* to, int dtype, int64_t at, float value) {
  if (dtype == FUSELINE_FLOAT32) {
    static_cast<float*>(to)[at] = value;
  } else if (dtype == FUSELINE_BFLOAT16) {
    static_cast<__nv_bfloat16*>(to)[at] = from_float<__nv_bfloat16>(value);
  } else {
    static_cast<__half*>(to)[at] = from_float<__half>(value);
  }
}

// Two elements of 16 bits in one word, the lower half first.
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&values)[kVector<T>]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack_pair<T>(words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&values)[kVector<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(values[i]);
    } else {
      words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A row is read once: it leaves the L1 to what is read again (weights, masks). Not the read-only path, since the
// output may be the input.
__device__ __forceinline__ uint4 load_once(const void* at) {
  uint4 raw;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(at));
  return raw;
}

// The compilers take the value for a new one (blocks are flat, so threadIdx.z is 0, but they do not know): what was
// derived from the old one is derived again, rather than kept in registers (addresses, widened elements) across a wait
// that many registers are held over.
__device__ __forceinline__ void forget(int& value) { value ^= int(threadIdx.z); }
__device__ __forceinline__ void forget(int64_t& value) { value ^= int64_t(threadIdx.z); }
__device__ __forceinline__ void forget(uint4& raw) {
  raw.x ^= threadIdx.z, raw.y ^= threadIdx.z, raw.z ^= threadIdx.z, raw.w ^= threadIdx.z;
}

// How many elements into its 16-byte vector `at` stands.
template <class T>
__device__ __forceinline__ int elements_into_vector(const T* at) {
  return int(reinterpret_cast<uintptr_t>(at) % 16) / int(sizeof(T));
}

// Elements first .. first + kVector of a row, zero where outside 0 .. limit. With kAligned the row starts at a
// multiple of 16 bytes, its length is a multiple of kVector, and an access that starts inside it stays inside,
// even past `limit`. Otherwise `vectors` says whether row + first is a multiple of 16 bytes.
template <class T, bool kAligned, class Index>
__device__ __forceinline__ uint4 load_vector(const T* row, Index first, Index limit, bool vectors) {
  if constexpr (kAligned) {
    return first < limit ? load_once(row + first) : make_uint4(0, 0, 0, 0);
  } else {
    if (vectors && first >= 0 && first + kVector<T> <= limit) return load_once(row + first);
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (first + i >= 0 && first + i < limit) {
        const uint32_t bits = reinterpret_cast<const Bits*>(row)[first + i];
        words[i * sizeof(T) / 4] |= sizeof(T) == 4 ? bits : bits << (16 * (i % 2));
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The same elements, written where inside 0 .. n.
template <class T, bool kAligned, class Index>
__device__ __forceinline__ void store_vector(T* row, Index first, Index n, bool vectors,
                                             const float (&values)[kVector<T>]) {
  if (kAligned ? first < n : vectors && first >= 0 && first + kVector<T> <= n) {
    *reinterpret_cast<uint4*>(row + first) = pack<T>(values);
  } else if (!kAligned) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (first + i >= 0 && first + i < n) row[first + i] = from_float<T>(values[i]);
    }
  }
}

// kCount elements that many rows read (weights, masks), in 8- or 16-byte accesses: `at` is a multiple of their size, or
// of 16 bytes.
template <class T, int kCount>
__device__ __forceinline__ void load_reused(const T* at, float (&values)[kCount]) {
  constexpr int kWords = kCount * int(sizeof(T)) / 4;
  static_assert(kWords == 2 || kWords % 4 == 0);
  uint32_t words[kWords];
  if constexpr (kWords == 2) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(at));
    words[0] = raw.x, words[1] = raw.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(at) + i / 4);
      words[i] = raw.x, words[i + 1] = raw.y, words[i + 2] = raw.z, words[i + 3] = raw.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack_pair<T>(words[i / 2]);
      values[i] = i % 2 ? pair.y : pair.x;
    }
  }
}

// e^x for x <= 0. The rows of 16-bit dtypes take the hardware's 2^x (2 units in the last place of fp32).
template <class T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
  }
}

}  // namespace fuseline
