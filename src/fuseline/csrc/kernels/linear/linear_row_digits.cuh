// One row of activations as digits, the B of integer products with quantized weights (linear_row.cuh).
//
// Weights of 8 and 4 bits are integers already. Made fp16 or bf16 for a product with x they cost a warp 50 to 90 instructions for
// each of a lane's 16 bytes, and a scheduler of an H200 has 126 cycles for these while they come. Here x is made integers instead,
// once a block: for each step of columns, 2^e times integers of 30 bits, each of them four digits to base 256. An int8 weight is then
// multiplied as it is read, an int4 one after one `and`, and the four digits are four of a product's eight columns.
//
// A step's sums are exact; they are scaled and added up in fp32. What of an x is below 2^-30 of the step's largest is rounded.
#pragma once

#include "linear_call.cuh"

namespace fuseline {

// Bytes of a chunk's digits: [digit][quad][half of the chunk][column], so that lane 4 g + q reads the sixteen of digit g % 4 at
// once. Columns stand as weights do: in int4 0, 2, 1, 3.
constexpr int kDigitBytes = kTileColumns * kRowDigits;

// D += A * B of 32 columns, A in bytes with a sign or without one, B in bytes with one.
template <bool kSigned>
__device__ __forceinline__ void mma_16832(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kSigned) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// The digits of eight columns that stand at vector `at` of the row, and what a step needs beside them; neighbouring lanes have
// neighbouring vectors, and all of a step are in a warp. Lanes that are not `there` only take part.
template <class T, class Weights>
__device__ __forceinline__ void store_digits(uint32_t digits, uint32_t factors, int at, bool there, const uint4& raw) {
  constexpr bool kInt4 = Weights::kGrouped;
  constexpr int kLanes = kInt4 ? 16 : 8;  // that have a step's columns
  float values[8];
  unpack<T>(raw, values);
  uint32_t most = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(fabsf(values[e])));  // NaN is more than all
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(~0u, most, offset));
  // Exponents as fp32 keeps them; the least keeps factors normal. Infinities are one times infinity, and what is beside them none.
  constexpr uint32_t kLeast = 30, kOfOne = 156, kInfinite = 0x7f800000u;
  const bool finite = most < kInfinite;
  const uint32_t exponent = finite ? max(most >> 23, kLeast) : kOfOne;
  if (!finite) {
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = isinf(values[e]) ? copysignf(1.f, values[e]) : 0.f;
  }
  const float to_integers = __uint_as_float((283 - exponent) << 23);  // the largest becomes 2^29 and more
  uint32_t words[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {  // digits from -128 to 127 but for the top one, which is smaller
    words[e] = (uint32_t(__float2int_rn(values[e] * to_integers)) + 0x00808080u) ^ 0x00808080u;
  }
  uint32_t digit[kRowDigits][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t *const w = words + 4 * i, second = w[kInt4 ? 2 : 1], third = w[kInt4 ? 1 : 2];
    const uint32_t low = __byte_perm(w[0], second, 0x5140), high = __byte_perm(w[0], second, 0x7362);
    const uint32_t low_after = __byte_perm(third, w[3], 0x5140), high_after = __byte_perm(third, w[3], 0x7362);
    digit[0][i] = __byte_perm(low, low_after, 0x5410), digit[1][i] = __byte_perm(low, low_after, 0x7632);
    digit[2][i] = __byte_perm(high, high_after, 0x5410), digit[3][i] = __byte_perm(high, high_after, 0x7632);
  }
  int start[2] = {};  // of the two lower digits and of the others: minus 8, the zero point, times x
  if constexpr (kInt4) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      int sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] = __dp4a(int(digit[2 * p + i][0]), 0x01010101, __dp4a(int(digit[2 * p + i][1]), 0x01010101, 0));
      }
      start[p] = -8 * (sums[0] + 256 * sums[1]);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) start[p] += __shfl_xor_sync(~0u, start[p], offset);
    }
  }
  if (!there) return;
  const uint32_t to = digits + at / 8 * kDigitBytes + at % 4 * 16 + at / 4 % 2 * 8;
#pragma unroll
  for (int d = 0; d < kRowDigits; ++d) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + d * 64), "r"(digit[d][0]), "r"(digit[d][1]) : "memory");
  }
  if (at % kLanes == 0) {
    const uint32_t factor = (exponent - 29) << 23;
    store_shared(factors + at / kLanes * kFactorBytes,
                 make_uint4(uint32_t(start[0]), finite ? factor : most, uint32_t(start[1]), finite ? factor : 0u));
  }
}

// sums, of rows g and g + 8 of a tile and of this lane's two digits, += the products of one step.
template <class Weights>
__device__ __forceinline__ void multiply_digits(uint32_t weights_at, uint32_t digits_at, uint32_t factors_at, uint32_t scales_at,
                                                float (&sums)[2]) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;  // row g's, and row g + 8's, sixteen times
  int start;
  float factor;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(start), "=f"(factor) : "r"(factors_at) : "memory");
  float2 scale = make_float2(factor, factor);
  const uint4 raws[2] = {load_shared(weights_at), load_shared(weights_at + kWarp * 16)};
  if constexpr (Weights::kGrouped) {
    int part[4] = {start, 0, start * 16, 0};
    const float2 of_group = unpack_pair<__nv_bfloat16>(load_shared_word(scales_at));
    scale.x *= of_group.x, scale.y *= of_group.y;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 raw = raws[c], b = load_shared(digits_at + c * kDigitBytes);
      mma_16832<false>(part, raw.x & kLow, raw.x & kHigh, raw.y & kLow, raw.y & kHigh, b.x, b.y);
      mma_16832<false>(part, raw.z & kLow, raw.z & kHigh, raw.w & kLow, raw.w & kHigh, b.z, b.w);
    }
    sums[0] = fmaf(float(part[0] + 256 * part[1]), scale.x, sums[0]);
    sums[1] = fmaf(float(part[2] + 256 * part[3]), scale.y, sums[1]);
  } else {
    int part[4] = {};
    const uint4 b = load_shared(digits_at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 raw = raws[h];
      mma_16832<true>(part, __byte_perm(raw.x, raw.y, 0x6420), __byte_perm(raw.x, raw.y, 0x7531),
                      __byte_perm(raw.z, raw.w, 0x6420), __byte_perm(raw.z, raw.w, 0x7531), h == 0 ? b.x : b.z, h == 0 ? b.y : b.w);
    }
    sums[0] = fmaf(float(part[0] + 256 * part[1]), scale.x, sums[0]);
    sums[1] = fmaf(float(part[2] + 256 * part[3]), scale.y, sums[1]);
  }
}

// Sums of two digits become those of x, in lanes of quads 0 and 1 alike.
template <class Weights>
__device__ __forceinline__ void join_digits(float (&sums)[2]) {
  const float place = threadIdx.x % 2 ? 65536.f : 1.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = sums[i] * (i == 1 && Weights::kGrouped ? place / 16.f : place);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sums[i] = sum;
  }
}

}  // namespace fuseline
