// What norm_backward_ring.cuh and norm_backward_tiled.cuh have of a row and of its columns: parts of rows in shared memory,
// weights, sums.
#pragma once

#include "kept.cuh"
#include "norm_backward_rows.cuh"
#include "device/waiting.cuh"

namespace fuseline {

// What all lanes of a warp have, known to be the same: addresses and branches made of it are the warp's, not each lane's.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(kAllLanes, value, 0); }

// Sends for columns from .. from + kColumns of a row, and answers how many bytes come; with `prepare` it only answers. One lane
// calls.
template <class T, int kColumns>
__device__ __forceinline__ int fetch_part(const NormBackward& a, const void* tensor, int64_t row, int from,
                                          unsigned char* to, uint64_t* arrived, bool prepare) {
  const int n = int(a.n), to_column = min(from + kColumns, n);
  if (from >= to_column) return 0;
  const int bytes = (to_column - from) * int(sizeof(T));
  if (!prepare) copy_in(to, static_cast<const T*>(tensor) + row * a.n + from, bytes, arrived);
  return bytes;
}

// A slot of a row out of shared memory: vectors `at` .. of the warp's part.
template <class T, int kSize>
__device__ __forceinline__ HeldSlot<T, kSize> take_slot(const unsigned char* part, int slot) {
  using Held = HeldSlot<T, kSize>;
  const uint4* const at = reinterpret_cast<const uint4*>(part) + slot * Held::kVectors;
  Held held;
#pragma unroll
  for (int v = 0; v < Held::kVectors; ++v) held.raw[v] = at[v];
  return held;
}

// The weights of this thread's slots, kept in shared memory as they are stored; ones where there are none.
template <class Kind>
struct RingWeights {
  static constexpr int kSize = Kind::kSize;
  uint4* at;  // of this thread
  bool fp32;

  __device__ __forceinline__ static int step() { return int(blockDim.x); }

  __device__ __forceinline__ void keep(const NormBackward& a, int slot, int first) const {
    float weight[kSize];
    weights_of_columns<typename Kind::Y, false>(a, first, weight);
    if (fp32) {
#pragma unroll
      for (int v = 0; v < kSize / 4; ++v) {
        const float part[4] = {weight[4 * v], weight[4 * v + 1], weight[4 * v + 2], weight[4 * v + 3]};
        at[(slot * (kSize / 4) + v) * step()] = pack<float>(part);
      }
    } else if constexpr (kSize == 8) {
      at[slot * step()] = pack<typename Kind::Y>(weight);
    }
  }

  __device__ __forceinline__ void take(int slot, float (&weight)[kSize]) const {
    if (fp32) {
#pragma unroll
      for (int v = 0; v < kSize / 4; ++v) {
        float part[4];
        unpack<float>(at[(slot * (kSize / 4) + v) * step()], part);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[4 * v + i] = part[i];
      }
    } else if constexpr (kSize == 8) {
      unpack<typename Kind::Y>(at[slot * step()], weight);
    }
  }
};

// A cluster's or block's partial sums of one kind, of which this thread has those of column(slot, i). Those of several
// groups are added up in shared memory, in fp64.
template <int kSize, int kStep, int kSlots, class Column>
__device__ __forceinline__ void write_columns(float* partials, float* shared, int start, int n, Column&& column) {
  const int groups = blockDim.y, width = int(blockDim.x) * kSlots * kSize;
  if (groups > 1) __syncthreads();  // what stood there is done with
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int first = start + k * kStep;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 four = make_float4(column(k, i), column(k, i + 1), column(k, i + 2), column(k, i + 3));
      if (groups > 1) {
        *reinterpret_cast<float4*>(shared + int(threadIdx.y) * width + first + i) = four;
      } else if (first + i < n) {  // a row of partial sums goes on to a multiple of four
        *reinterpret_cast<float4*>(partials + first + i) = four;
      }
    }
  }
  if (groups == 1) return;
  __syncthreads();
  for (int c = int(threadIdx.y * blockDim.x + threadIdx.x); c < n; c += int(blockDim.x * blockDim.y)) {
    double sum = 0.0;
#pragma unroll 4
    for (int group = 0; group < groups; ++group) sum += shared[group * width + c];
    partials[c] = float(sum);
  }
}

}  // namespace fuseline
