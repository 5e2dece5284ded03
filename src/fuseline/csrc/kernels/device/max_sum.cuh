// The maximum of a row and the sum of its exponentials against it, agreed on in one meeting (Milakov and Gimelshein
// 2018): each warp takes its own maximum and sum, and what differs is scaled afterwards.
#pragma once

#include <type_traits>

#include "group.cuh"
#include "vector.cuh"

namespace fuseline {

// Sums of the exponentials of fp32 rows are kept in double: their rounding would stand in every element of the row.
template <class T>
using Total = std::conditional_t<sizeof(T) == 4, double, float>;

// Four elements come together in fp32: to widen each takes four times as long as all else that is done with it.
template <class T>
__device__ __forceinline__ void add_vector(Total<T>& sum, const float (&values)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    sum += double((values[0] + values[1]) + (values[2] + values[3]));
  } else {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) sum += values[i];
  }
}

template <class T>
struct MaxSum {
  float max;
  float linear;  // a sum of the scores themselves, for who wants one
  Total<T> sum;
};

// Exponentials are taken against this: a row of nothing but -inf then has exp(-inf) = 0 all over, not NaN.
__device__ __forceinline__ float finite(float max) { return max == -kInfinity ? 0.f : max; }

// Those of the row from those of each warp.
template <class T, bool kLinear, bool kOneWarp>
__device__ __forceinline__ MaxSum<T> meet(const MaxSum<T>& warp, Group<MaxSum<T>, kOneWarp>& group) {
  if (group.in_one_warp()) return warp;
  const MaxSum<T>* states = group.publish(warp);
  const int lanes = group.lanes_of_states(), first = group.lane & (lanes - 1);
  MaxSum<T> row{-kInfinity, 0.f, 0};
#pragma unroll 1
  for (int i = first; i < group.states; i += kWarp) {
    row.max = fmaxf(row.max, states[i].max);
    if (kLinear) row.linear += states[i].linear;
  }
  row.max = largest_of_warp(row.max);
  if (kLinear) row.linear = sum_of_lanes(row.linear, lanes);
#pragma unroll 1
  for (int i = first; i < group.states; i += kWarp) {
    row.sum += states[i].sum * exponential<T>(states[i].max - finite(row.max));
  }
  row.sum = sum_of_lanes(row.sum, lanes);
  return row;
}

}  // namespace fuseline
