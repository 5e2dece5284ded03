// The powers e^z, z = scale * x at a scale above 0, of long rows: their largest exponent, their sum against it, and the
// powers again (max_sum.cuh has the same for rows in registers, at any scale and with masks).
//
// The exponent of x against the largest element is fmaf(x, unit, -shift), unit being the scale (for 16 bits times
// log2(e), for the hardware's 2^x) and shift the rounded largest x * unit: what its rounding leaves stands in every power
// and in their sum. Where that could be more than a few units the exponent is (x - max) * unit.
#pragma once

#include "max_sum.cuh"
#include "waiting.cuh"

namespace fuseline {

template <class T>
__device__ __forceinline__ float unit_of(float scale) {
  return sizeof(T) == 4 ? scale : scale * 1.4426950408889634f;
}

template <class T>
__device__ __forceinline__ float power(float exponent) {
  if constexpr (sizeof(T) == 4) {
    return expf(exponent);
  } else {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
  }
}

// Not to be fused with what it is subtracted from: shifts of the same element have to be equal.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }

// What exponents are taken against.
template <class T>
struct Top {
  float max, shift;
  bool far;

  __device__ __forceinline__ Top(float largest, float unit) : max(finite(largest)), shift(product(max, unit)) {
    far = !(fabsf(shift) < 67108864.f) && fabsf(max) < kInfinity;
  }
  // Elements become their powers.
  __device__ __forceinline__ void raise(float (&x)[kVector<T>], float unit) const {
    if (!far) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) x[i] = power<T>(fmaf(x[i], unit, -shift));
    } else {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) x[i] = power<T>((x[i] - max) * unit);
    }
  }
  // What powers against `other` are multiplied by to be against this one, which is no less.
  __device__ __forceinline__ float rebased(const Top& other, float unit) const {
    return power<T>(far ? (other.max - max) * unit : other.shift - shift);
  }
  // What takes out of a power what the rounding of shift left in it.
  __device__ __forceinline__ float rest(float unit) const { return far ? 1.f : power<T>(fmaf(-max, unit, shift)); }
};

// -inf in every element of a word.
template <class T>
constexpr uint32_t kNothing = std::is_same_v<T, float>    ? 0xff800000u
                              : std::is_same_v<T, __half> ? 0xfc00fc00u
                                                          : 0xff80ff80u;

// The larger elements of two words.
template <class T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair pair = __hmax2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class T>
__device__ __forceinline__ float largest_of(uint32_t word) {
  if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(word);
  } else {
    const float2 pair = unpack_pair<T>(word);
    return fmaxf(pair.x, pair.y);
  }
}

__device__ __forceinline__ float max_over_warp(float value) { return largest_of_warp(value); }

// The largest element, and the sum of the powers against it: of a thread, a warp, a row.
template <class T>
struct alignas(2 * sizeof(Total<T>)) Powers {
  float max = -kInfinity;
  Total<T> sum = 0;

  // Adds vectors; what is outside the row in them is -inf.
  template <int kCount>
  __device__ __forceinline__ void take(const uint4 (&raw)[kCount], float unit) {
    uint32_t most = larger<T>(larger<T>(raw[0].x, raw[0].y), larger<T>(raw[0].z, raw[0].w));
#pragma unroll
    for (int k = 1; k < kCount; ++k) {
      most = larger<T>(most, larger<T>(larger<T>(raw[k].x, raw[k].y), larger<T>(raw[k].z, raw[k].w)));
    }
    const float now = fmaxf(max, largest_of<T>(most));
    const Top<T> top(now, unit);
    if (max > -kInfinity) sum *= top.rebased(Top<T>(max, unit), unit);
    max = now;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float x[kVector<T>];
      unpack<T>(raw[k], x);
      top.raise(x, unit);
      add_vector<T>(sum, x);
    }
  }

  // The sum against a larger element.
  __device__ __forceinline__ Total<T> sum_against(float larger_max, float unit) const {
    const float factor = max > -kInfinity ? Top<T>(larger_max, unit).rebased(Top<T>(max, unit), unit) : 0.f;
    return sum * factor;  // NaN stays NaN
  }

  // Of all lanes, the same in each.
  __device__ __forceinline__ Powers over_warp(float unit) const {
    Powers whole;
    whole.max = max_over_warp(max);
    whole.sum = sum_over_warp(sum_against(whole.max, unit));
    return whole;
  }
};

// Of `count` states together, in every lane of the warp.
template <class T>
__device__ __forceinline__ Powers<T> gather(const Powers<T>* states, int count, float unit) {
  const int lane = int(threadIdx.x) % kWarp;
  Powers<T> mine;
  if (lane < count) mine = states[lane];
#pragma unroll 1
  for (int i = lane + kWarp; i < count; i += kWarp) {
    const Powers<T> other = states[i];
    const float max = fmaxf(mine.max, other.max);
    mine.sum = mine.sum_against(max, unit) + other.sum_against(max, unit);
    mine.max = max;
  }
  return mine.over_warp(unit);
}

}  // namespace fuseline
