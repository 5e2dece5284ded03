// What the backward kernels of softmax share: the sums of a row and the gradient from them.
#pragma once

#include <type_traits>

#include "device/group.cuh"
#include "device/vector.cuh"

namespace fuseline {

// sum(grad_out * y), and sum(y) for 16-bit rows.
template <class T>
using Sums = std::conditional_t<sizeof(T) == 4, double, float2>;

template <class T>
__device__ __forceinline__ void add_to(Sums<T>& sums, float grad, float y) {
  if constexpr (sizeof(T) == 4) {
    sums += double(grad) * double(y);
  } else {
    sums.x += grad * y;
    sums.y += y;
  }
}

template <class T>
__device__ __forceinline__ Sums<T> sums_of(const uint4& grad_raw, const uint4& y_raw) {
  float grad[kVector<T>], y[kVector<T>];
  unpack<T>(grad_raw, grad);
  unpack<T>(y_raw, y);
  Sums<T> sums{};
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) add_to<T>(sums, grad[i], y[i]);
  return sums;
}

// What is taken off grad_out. A row of zeros has no sum, and no gradient either.
__device__ __forceinline__ float mean_of(double sum) { return float(sum); }
__device__ __forceinline__ float mean_of(float2 sums) { return sums.y == 0.f ? 0.f : sums.x / sums.y; }

// Where y is 0 the gradient is, too, whatever was given: a hidden key stays clear of the NaN of its row.
template <class T>
__device__ __forceinline__ void gradient(const uint4& grad_raw, const uint4& y_raw, float mean, float scale,
                                         float (&result)[kVector<T>]) {
  float grad[kVector<T>], y[kVector<T>];
  unpack<T>(grad_raw, grad);
  unpack<T>(y_raw, y);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) result[i] = y[i] == 0.f ? 0.f : scale * y[i] * (grad[i] - mean);
}

}  // namespace fuseline
