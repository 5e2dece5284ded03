// Activations and their derivatives in fp32 registers: SiLU, and GELU in its two forms.
//
// For fp32 SiLU is right to one unit in the last place, the GELUs to a few (up to 30 where the result is under 1e-8 of
// x), in the negative tail too, where the textbook form 0.5 * x * (1 + tanh(..)) cancels. For the 16-bit dtypes T they
// take the hardware's 2^x and 1 / x and a shorter polynomial: off by less than a twentieth of a rounding of T. Infinite x
// give what torch's formulas give: -inf the value NaN, and both the derivative NaN. So do x whose square is infinite in the
// derivative of GELU's tanh form.
#pragma once

#include <type_traits>

#include "../fuseline_kernels.h"
#include "vector.cuh"

namespace fuseline {

__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x within -most .. most; NaN stays NaN.
__device__ __forceinline__ float clamp(float x, float most) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(most));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(result) : "f"(-most));
  return result;
}

// Each has `value` (of x) and `both` (value and derivative).

// x * sigmoid(x), the sigmoid being 1 / (1 + e^-x).
template <class T>
struct Silu {

  static __device__ __forceinline__ float power(float x) { return fast_exp2(x * -1.4426950408889634f); }
  static __device__ __forceinline__ float value(float x) {
    // By a quarter: 1 / (1 + e^-x) itself can be too small to be a number where the result is not.
    const float quarter = fast_exp2(fmaf(x, -1.4426950408889634f, -2.f));
    return 0.25f * x * fast_reciprocal(0.25f + quarter);
  }
  static __device__ __forceinline__ float2 both(float x) {
    // e^-x would be infinite at less than -88, where the sigmoid is 0.
    const float inside = clamp(x, 88.f), e = power(inside);
    const float sigmoid = fast_reciprocal(1.f + e);
    const float slope = fmaf(inside, e * sigmoid, 1.f) * sigmoid;  // 1 - sigmoid does not cancel so
    return make_float2(x * sigmoid, fmaf(0.f, x, slope));          // 0 x is NaN where x is infinite
  }
};

// For fp32 what is rounded on the way is carried along, as the sum of two floats: the results are rounded once.
struct Two {
  float high, low;
};

template <>
struct Silu<float> {
  // 1 + e^-x for |x| up to 87, e^-x being 2^n * e^r, |r| at most log(2) / 2.
  static __device__ __forceinline__ Two one_and_power(float x) {
    const float n = rintf(x * -1.4426950408889634f);
    const float coarse = fmaf(n, -0.693145751953125f, -x);  // exact
    const float r = fmaf(n, -1.42860677e-6f, coarse);
    const float r_rest = fmaf(n, -1.42860677e-6f, coarse - r);
    float series = 2.48015873e-5f;
    series = fmaf(series, r, 1.98412698e-4f);
    series = fmaf(series, r, 1.38888889e-3f);
    series = fmaf(series, r, 8.33333333e-3f);
    series = fmaf(series, r, 4.16666667e-2f);
    series = fmaf(series, r, 1.66666667e-1f);
    series = fmaf(series, r, 0.5f);
    const float scale = __int_as_float((int(n) + 127) << 23);
    const float sum = 1.f + r;
    const float rest = ((1.f - sum) + r) + fmaf(r * r, series, r_rest);
    const float whole = sum + rest;
    const float e = __fmul_rn(whole, scale), e_rest = (rest - (whole - sum)) * scale;
    const float y = 1.f + e;
    return {y, (e < 1.f ? e - (y - 1.f) : 1.f - (y - e)) + e_rest};
  }
  static __device__ __forceinline__ float value(float x) {
    if (!(fabsf(x) < 87.f)) return __fdiv_rn(x, 1.f + expf(-x));
    const Two y = one_and_power(x);
    const float quotient = __fdiv_rn(x, y.high);
    const float left = fmaf(-quotient, y.low, fmaf(-quotient, y.high, x));
    return fmaf(left, fast_reciprocal(y.high), quotient);
  }
  static __device__ __forceinline__ float2 both(float x) {
    const float inside = clamp(x, 87.f);  // beyond, the derivative is 0 or 1
    const Two y = one_and_power(inside);
    const float s = __fdiv_rn(1.f, y.high);
    const float s_rest = fmaf(-s, y.low, fmaf(-s, y.high, 1.f)) * s;
    const float value = __fmul_rn(inside, s);  // not to be fused with what is added
    const float value_rest = fmaf(inside, s_rest, fmaf(inside, s, -value));
    const float t = 1.f - s, t_rest = ((1.f - t) - s) - s_rest;  // 1 minus the sigmoid
    const float product = __fmul_rn(inside, t), product_rest = fmaf(inside, t_rest, fmaf(inside, t, -product));
    const float u = 1.f + product, of_product = u - 1.f;
    const float u_rest = ((1.f - (u - of_product)) + (product - of_product)) + product_rest;
    const float slope = __fmul_rn(u, s);
    const float slope_rest = fmaf(u, s_rest, fmaf(u_rest, s, fmaf(u, s, -slope)));
    const float derivative = x < -89.f ? 0.f : slope + slope_rest;
    return make_float2(x == inside ? value + value_rest : x * s, fmaf(0.f, x, derivative));  // NaN where x is infinite
  }
};

// 0.5 * x * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 * x^3).
template <class T>
struct GeluTanh {
  // -2u * log2(e) = x * (kLinear + kCubic * x^2).
  static constexpr float kLinear = -2.3022082f, kLinearRest = -1.2948402e-8f;
  static constexpr float kCubic = -0.10294324f, kCubicRest = 2.0161984e-9f;

  static __device__ __forceinline__ float power(float x, float square) {
    const float slope = fmaf(kCubic, square, kLinear);
    const float exponent = x * slope;
    const float e = fast_exp2(exponent);
    if constexpr (sizeof(T) != 4) return e;
    // What the three roundings of the exponent left out: it may be 30 and more, its error is the result's.
    float rest = fmaf(kCubic, fmaf(x, x, -square), fmaf(kCubicRest, square, kLinearRest));
    rest += fmaf(kCubic, square, kLinear - slope);
    rest = fmaf(x, rest, fmaf(x, slope, -exponent));
    return e * fmaf(rest, 0.6931471805599453f, 1.f);
  }
  static __device__ __forceinline__ float value(float x) {
    const float inside = sizeof(T) == 4 ? clamp(x, 16.f) : x;
    return x * fast_reciprocal(1.f + power(inside, inside * inside));
  }
  static __device__ __forceinline__ float2 both(float x) {
    const float inside = sizeof(T) == 4 ? clamp(x, 16.f) : x;
    const float square = inside * inside;
    const float e = power(inside, square);
    const float half = fast_reciprocal(1.f + e), value = x * half;  // half is (1 + tanh(u)) / 2
    float rest = 1.f - half;
    if constexpr (sizeof(T) == 4) rest = x > 0.f ? e * half : rest;  // which would cancel
    return make_float2(value, fmaf(value * rest, fmaf(0.2140644505f, square, 1.5957691216f), half));  // 2u' beside it
  }
};

// x * Phi(x), Phi the normal distribution.
template <class T>
struct GeluErf {
  // e^(-x^2 / 2) of |x| up to 14.5, for fp32.
  static __device__ __forceinline__ float density(float x) {
    constexpr float kHalf = -0.7213475108146667f, kHalfRest = -9.629815e-9f;  // of log2(e), below 0
    const float square = x * x;
    const float exponent = square * kHalf;
    const float e = fast_exp2(exponent);
    // What the roundings of the square and of the exponent left out.
    const float rest = fmaf(square, kHalfRest, fmaf(fmaf(x, x, -square), kHalf, fmaf(square, kHalf, -exponent)));
    return fmaf(e, rest * 0.6931471805599453f, e);
  }
  // Phi(x), and its derivative beside it.
  static __device__ __forceinline__ float2 normal(float x) {
    float tail, slope;  // Phi(-|x|)
    if constexpr (sizeof(T) == 4) {
      // Phi(-|x|) e^(x^2 / 2) is a polynomial in 1 / (1 + 0.29 |x|), fitted on 0 .. 14.
      const float inside = clamp(x, 14.5f);
      const float e = density(inside);
      const float inverse = fmaf(0.29f, fabsf(inside), 1.f);
      float t = fast_reciprocal(inverse);
      t = fmaf(t, fmaf(-inverse, t, 1.f), t);
      float p = -0.018135104328393936f;
      p = fmaf(p, t, 0.10979848355054855f);
      p = fmaf(p, t, -0.25157973170280457f);
      p = fmaf(p, t, 0.2500858008861542f);
      p = fmaf(p, t, -0.12158934772014618f);
      p = fmaf(p, t, 0.12137100845575333f);
      p = fmaf(p, t, 0.07024536281824112f);
      p = fmaf(p, t, 0.10866165906190872f);
      p = fmaf(p, t, 0.11543815582990646f);
      p = fmaf(p, t, 0.11570370942354202f);
      tail = p * t * e, slope = 0.3989422804014327f * e;
    } else {
      // Phi(-|x|) over the density is a polynomial in 1 / (1 + c |x|), fitted to units in the last place of x Phi(x) over
      // the inputs of T: off by 0.018 of them for bf16 and 0.016 for fp16.
      constexpr bool kFp16 = std::is_same_v<T, __half>;
      slope = fast_exp2(fmaf(x * x, -0.7213475204444817f, -1.3257480647361595f));
      const float t = fast_reciprocal(fmaf(kFp16 ? 0.425f : 0.468f, fabsf(x), 1.f));
      float p = kFp16 ? -0.32545411586761475f : -0.31692665815353394f;
      p = fmaf(p, t, kFp16 ? 0.9894568920135498f : 0.7447955012321472f);
      p = fmaf(p, t, kFp16 ? 0.08783506602048874f : 0.33809539675712585f);
      p = fmaf(p, t, kFp16 ? 0.509834349155426f : 0.488458514213562f);
      p = fmaf(p, t, kFp16 ? -0.008368621580302715f : -0.0012002502335235476f);
      tail = __fmul_rn(p, slope);  // not fused with what follows: `value` and `both` give the same bits
    }
    return make_float2(x < 0.f ? tail : 1.f - tail, slope);
  }
  static __device__ __forceinline__ float value(float x) { return x * normal(x).x; }
  static __device__ __forceinline__ float2 both(float x) {
    const float2 at = normal(x);
    return make_float2(x * at.x, fmaf(x, at.y, at.x));
  }
};

}  // namespace fuseline
