// Row loads and stores with conversion, an exponential and reductions that compilers turn into vector code.
// Included by *_rows.cpp only; FUSELINE_ISA is the suffix of the instruction set it is compiled for.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "rows.h"

#define FUSELINE_JOIN2(a, b) a##_##b
#define FUSELINE_JOIN(a, b) FUSELINE_JOIN2(a, b)
#define FUSELINE_NAME(name) FUSELINE_JOIN(name, FUSELINE_ISA)

namespace fuseline::cpu {
namespace {

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bfloat16(uint16_t value) { return as_float(static_cast<uint32_t>(value) << 16); }

inline uint16_t to_bfloat16(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// The exponent is rebased by a multiplication, which also gets subnormals right; infinities and NaN apart.
inline float from_float16(uint16_t value) {
    const uint32_t magnitude = (static_cast<uint32_t>(value) & 0x7fffu) << 13;
    const float rebased = as_float(magnitude) * 0x1p112f;
    const float finite = magnitude >= 0x0f800000u ? as_float(magnitude | 0x7f800000u) : rebased;
    return as_float(as_bits(finite) | (static_cast<uint32_t>(value & 0x8000u) << 16));
}

inline uint16_t to_float16(float value) {
    const uint32_t sign = (as_bits(value) >> 16) & 0x8000u;
    const uint32_t magnitude = as_bits(value) & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more rounds to infinity
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, rounded by the addition itself
        half = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
}

inline void load_float16(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
#endif
    for (; i < n; ++i) to[i] = from_float16(from[i]);
}

inline void store_float16(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
#endif
    for (; i < n; ++i) to[i] = to_float16(from[i]);
}

inline void load_bfloat16(const uint16_t* from, float* to, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = from_bfloat16(from[i]);
}

inline void store_bfloat16(const float* from, uint16_t* to, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i]);
}

inline int64_t element_size(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

inline const void* at_element(const void* base, Type type, int64_t index) {
    return static_cast<const char*>(base) + index * element_size(type);
}

inline void* at_element(void* base, Type type, int64_t index) {
    return static_cast<char*>(base) + index * element_size(type);
}

// n elements from `index` on as accumulators: where they stand if they are such already, else converted to `room`.
inline const float* load_row(const void* base, Type type, int64_t index, float* room, int64_t n) {
    const void* from = at_element(base, type, index);
    if (type == Type::f32) return static_cast<const float*>(from);
    if (type == Type::f16) load_float16(static_cast<const uint16_t*>(from), room, n);
    if (type == Type::bf16) load_bfloat16(static_cast<const uint16_t*>(from), room, n);
    if (type == Type::f64) {
        for (int64_t i = 0; i < n; ++i) room[i] = static_cast<float>(static_cast<const double*>(from)[i]);
    }
    return room;
}

inline const double* load_row(const void* base, Type type, int64_t index, double* room, int64_t n) {
    const void* from = at_element(base, type, index);
    if (type == Type::f64) return static_cast<const double*>(from);
    if (type == Type::f32) {
        for (int64_t i = 0; i < n; ++i) room[i] = static_cast<const float*>(from)[i];
    } else if (type == Type::f16) {
        for (int64_t i = 0; i < n; ++i) room[i] = from_float16(static_cast<const uint16_t*>(from)[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) room[i] = from_bfloat16(static_cast<const uint16_t*>(from)[i]);
    }
    return room;
}

// Where results may be computed: in the output itself if it holds accumulators, else in `room`.
inline float* open_row(void* base, Type type, int64_t index, float* room) {
    return type == Type::f32 ? static_cast<float*>(at_element(base, type, index)) : room;
}

inline double* open_row(void* base, Type type, int64_t index, double* room) {
    return type == Type::f64 ? static_cast<double*>(base) + index : room;
}

// Rounds what was computed in `room` into the output; nothing is left to do where open_row gave the output itself.
inline void close_row(void* base, Type type, int64_t index, const float* room, int64_t n) {
    void* to = at_element(base, type, index);
    if (type == Type::f16) store_float16(room, static_cast<uint16_t*>(to), n);
    if (type == Type::bf16) store_bfloat16(room, static_cast<uint16_t*>(to), n);
}

inline void close_row(void* base, Type type, int64_t index, const double* room, int64_t n) {
    if (type == Type::f64) return;
    for (int64_t i = 0; i < n; ++i) {
        const float value = static_cast<float>(room[i]);
        if (type == Type::f32) static_cast<float*>(at_element(base, type, index))[i] = value;
        close_row(base, type, index + i, &value, 1);
    }
}

// How much of a row is worked on at a time.
inline int64_t tile_of(Type type, int64_t n) {
    return type == Type::f32 || type == Type::f64 || n < tile_elements ? n : tile_elements;
}

// a * b + c, rounded once where the machine can. Compiled with -ffp-contract=off: elsewhere nothing is fused.
template <typename A>
inline A multiply_add(A a, A b, A c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

// exp(x) for x <= 0, to about one unit in the last place; NaN stays NaN; results under 2^-126 are zero.
// Cody and Waite's reduction x = n ln 2 + r with |r| <= ln 2 / 2, and a minimax polynomial for exp(r).
inline float exp_nonpositive(float x) {
    constexpr float round_trick = 0x1.8p23f;  // adding and subtracting it rounds to the nearest integer
    const float shifted = multiply_add(x, 0x1.715476p0f, round_trick);
    const float n = shifted - round_trick;
    const float r = multiply_add(n, -0x1.7f7d1cp-20f, multiply_add(n, -0x1.62e4p-1f, x));
    float p = 0x1.6850e4p-10f;
    p = multiply_add(p, r, 0x1.123bccp-7f);
    p = multiply_add(p, r, 0x1.555b98p-5f);
    p = multiply_add(p, r, 0x1.55548ep-3f);
    p = multiply_add(p, r, 0x1.fffff8p-2f);
    p = multiply_add(p, r, 1.0f);
    p = multiply_add(p, r, 1.0f);
    const float power = as_float((as_bits(shifted) + 127u) << 23);  // 2^n: n stands in the low bits of `shifted`
    const float result = p * power;
    return x < -87.3365f ? 0.0f : result;
}

inline double exp_nonpositive(double x) { return std::exp(x); }

}  // namespace
}  // namespace fuseline::cpu
