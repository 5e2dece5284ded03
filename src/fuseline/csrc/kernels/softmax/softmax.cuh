// What the forward kernels of softmax share: their arguments, where a row stands under its mask, the mask's elements, and
// the division by the sum.
#pragma once

#include "plans/softmax.h"
#include "device/launch.cuh"
#include "device/max_sum.cuh"

namespace fuseline {

struct SoftmaxForward {
  const void* x;
  const void* mask;
  void* y;
  int64_t mask_strides[4];
  int64_t rows, n;        // of [B * H * T, S]
  int64_t heads, height;  // H and T
  float scale;
  int mask_kind;
  bool causal;
  bool y_vectors;     // y stands in its 16-byte vectors as x does
  bool mask_vectors;  // the mask can be read a vector of x at a time
  int cluster;
  int part;           // slots of a warp's part of a row that waits, or rows of a tile
  int together;       // rows that wait in a block
  int line;           // bytes, at which the parts of rows that wait begin
};

// Where a row stands in [B, H, T], as its mask's first element and how many of its keys it may see.
struct Row {
  int64_t mask_at;
  int64_t visible;
};

template <class Integer>
__device__ __forceinline__ Row locate(const SoftmaxForward& a, Integer row) {
  const Integer bh = row / Integer(a.height);
  const Integer t = row - bh * Integer(a.height);
  const Integer b = bh / Integer(a.heads);
  const Integer h = bh - b * Integer(a.heads);
  const int64_t reach = int64_t(t) + 1 + a.n - a.height;
  return {int64_t(b) * a.mask_strides[0] + int64_t(h) * a.mask_strides[1] + int64_t(t) * a.mask_strides[2],
          a.causal ? (reach < 0 ? 0 : (reach < a.n ? reach : a.n)) : a.n};
}

__device__ __forceinline__ Row locate_row(const SoftmaxForward& a, int64_t row) {
  if (row >= a.rows) return {0, 0};
  if (!a.causal && a.mask_kind == FUSELINE_MASK_NONE) return {0, a.n};
  return a.rows <= 0xffffffffll ? locate<uint32_t>(a, uint32_t(row)) : locate<int64_t>(a, row);
}

template <class T>
__device__ __forceinline__ float mask_one(const SoftmaxForward& a, int64_t at, float score) {
  if (a.mask_kind == FUSELINE_MASK_BOOL) return static_cast<const uint8_t*>(a.mask)[at] ? score : -kInfinity;
  if (a.mask_kind == FUSELINE_MASK_ADD) return score + to_float(static_cast<const T*>(a.mask)[at]);
  return score + static_cast<const float*>(a.mask)[at];
}

template <class T>
__device__ __forceinline__ void mask_vector(const SoftmaxForward& a, int64_t at, float (&score)[kVector<T>]) {
  if (a.mask_kind == FUSELINE_MASK_BOOL) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(a.mask) + at);
#pragma unroll
    for (int w = 0; w < kVector<T> / 4; ++w) {
      const uint32_t four = __ldg(words + w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((four & (0xffu << (8 * i))) == 0) score[4 * w + i] = -kInfinity;
      }
    }
    return;
  }
  float added[kVector<T>];
  if (a.mask_kind == FUSELINE_MASK_ADD) {
    load_reused<T>(static_cast<const T*>(a.mask) + at, added);
  } else {
    load_reused<float>(static_cast<const float*>(a.mask) + at, added);
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) score[i] += added[i];
}

// What the exponentials are multiplied by: factor / sum, for fp32 rows with what its rounding left out.
struct Share {
  float whole, rest;
};

__device__ __forceinline__ Share divide(float factor, float sum) { return {sum == 0.f ? 0.f : factor / sum, 0.f}; }
__device__ __forceinline__ Share divide(float factor, double sum) {
  const float reciprocal = sum == 0. ? 0.f : 1.f / float(sum);
  const float whole = factor * reciprocal;
  return {whole, float(fma(-double(whole), sum, double(factor))) * reciprocal};
}

template <class T>
__device__ __forceinline__ float times(float value, const Share& share) {
  return sizeof(T) == 4 ? fmaf(value, share.whole, value * share.rest) : value * share.whole;
}

// The scores of a row, in the registers of its threads, become their shares of it.
template <class T, int kHeld, bool kOneWarp>
__device__ __forceinline__ void share_out(Group<MaxSum<T>, kOneWarp>& group, float (&score)[kHeld][kVector<T>]) {
  float max = -kInfinity;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) max = fmaxf(max, score[k][i]);
  }
  MaxSum<T> warp{group.warp_max(max), 0.f, 0};
  const float taken_out = finite(warp.max);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) score[k][i] = exponential<T>(score[k][i] - taken_out);
    add_vector<T>(warp.sum, score[k]);
  }
  warp.sum = group.warp_sum(warp.sum);
  const MaxSum<T> whole = meet<T, false>(warp, group);
  const Share share = divide(exponential<T>(warp.max - finite(whole.max)), whole.sum);  // 0 of a warp that sees nothing
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) score[k][i] = times<T>(score[k][i], share);
  }
}

// Rows in 16-byte steps under a mask that can be read so, or causal: softmax_masked.cu. False for others.
int run_softmax_masked(const SoftmaxForward& a, const SoftmaxPlan& plan, int dtype, const Device& device, void* stream);

}  // namespace fuseline
