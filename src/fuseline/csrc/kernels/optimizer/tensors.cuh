// Many tensors of any length in one launch: their pieces, numbered through.
//
// What a kernel knows of the tensors is part of its arguments, of which a launch may have 32,764 bytes. Nothing is copied
// to the device before, and a CUDA graph that holds the launch holds them. More tensors than fit take a further launch.
#pragma once

#include <algorithm>

#include "device/launch.cuh"
#include "fuseline_optimizer.h"
#include "plans/optimizer.h"

namespace fuseline {

constexpr int kMostArgumentBytes = 32764;

// Elements of a piece.
template <class T>
constexpr int kPiece = kPieceBytes / int(sizeof(T));

// The tensor of a piece, first[i] being the first piece of tensor i: from `low` on, of `count`.
template <int kMost>
__device__ __forceinline__ int tensor_of(const uint32_t (&first)[kMost], int low, int count, uint32_t piece) {
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first[middle] <= piece ? low : high) = middle;
  }
  return low;
}

// Counts this block in: the number of those that came before. What the thread read or wrote before, it did before that.
__device__ __forceinline__ uint32_t arrive(uint32_t* arrived) {
  __threadfence();
  return atomicAdd(arrived, 1u);
}

// For callers: the launches of a plan, of which there is room for `most`. Answers how many there are, or the plan's code.
inline int64_t write_launches(const TensorsPlan& plan, fuseline_tensors_launch* launches, int64_t most) {
  if (plan.code != 0) return plan.code;
  const int64_t count = int64_t(plan.launches.size());
  for (int64_t i = 0; i < std::min(count, most); ++i) {
    const TensorsLaunch& by = plan.launches[i];
    launches[i] = {name_of(by.kernel), plan.reason, by.first, by.tensors, by.pieces, by.shape.grid, by.shape.threads};
  }
  return count;
}

}  // namespace fuseline
