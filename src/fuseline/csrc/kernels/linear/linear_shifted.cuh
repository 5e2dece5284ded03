// Rows of weights of 16 bits that begin at any element, odd lengths of them say, read in whole vectors of memory.
//
// Rows kTurn apart begin equally far into a vector of 16 bytes: at its element `head`. A block has only such rows. x stands in
// its shared memory so many elements further on, and what is multiplied are vectors of memory as they come, but for the first
// and the last of a row, which lose what belongs to its neighbours: that may be infinite.
#pragma once

#include "linear_call.cuh"
#include "linear_x.cuh"

namespace fuseline {

constexpr int kTurn = 8;

__device__ __forceinline__ int head_of_row(const LinearArguments& a, int row) {
  return int((uint32_t(reinterpret_cast<uintptr_t>(a.weight)) + uint32_t(row) * uint32_t(a.weight_stride)) % 16 / 2);
}

// Ends of a block's rows.
struct RowEnds {
  uint4 own[2];      // bits of the first vector and of the last that are the row's
  uint4 outside[2];  // the weight's own ends: those vectors of its first row and its last may reach out of it

  // What of vector `at` of so many is the row's.
  __device__ __forceinline__ uint4 trim(const LinearArguments& a, uint4 raw, int row, int at, int vectors) const {
    const auto part = [&raw](const uint4& bits) {
      return make_uint4(raw.x & bits.x, raw.y & bits.y, raw.z & bits.z, raw.w & bits.w);
    };
    if (at == 0) raw = row == 0 ? outside[0] : part(own[0]);
    if (at == vectors - 1) raw = row == a.n - 1 ? outside[1] : part(own[1]);
    return raw;
  }

  // Whether it is one of those that may reach out of the weight.
  __device__ static __forceinline__ bool may_reach_out(const LinearArguments& a, int row, int at, int vectors) {
    return (row == 0 && at == 0) || (row == a.n - 1 && at == vectors - 1);
  }
};

// x to shared memory, [m][vectors], zeros before and behind its columns; and the ends of rows. Of M rows those that there are.
template <int M>
__device__ __forceinline__ void fetch_shifted(const LinearArguments& a, uint4* to, RowEnds& ends, int head, int vectors) {
  constexpr int kTogether = 4;
  const int count = M * vectors;
  for (int begin = threadIdx.x; begin < count; begin += kTogether * kLinearThreads) {
    uint4 raw[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = begin + u * kLinearThreads, row = i / vectors;
      raw[u] = make_uint4(0, 0, 0, 0);
      if (row < a.m) raw[u] = load_eight(a.x + row * a.x_stride, 8 * (i - row * vectors) - head, a.k);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = begin + u * kLinearThreads;
      if (i < count) to[i] = raw[u];
    }
  }
  if (threadIdx.x < 2) {  // the one first vectors, the other last ones
    const bool last = threadIdx.x == 1;
    const int first = last ? 8 * (vectors - 1) - head : -head;  // element of the row that the vector begins with
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (first + e >= 0 && first + e < a.k) words[e / 2] |= 0xffffu << (16 * (e % 2));
    }
    ends.own[last] = make_uint4(words[0], words[1], words[2], words[3]);
    ends.outside[last] = load_eight(a.weight + (last ? a.n - 1 : 0) * a.weight_stride, first, a.k);
  }
  __syncthreads();
}

}  // namespace fuseline
