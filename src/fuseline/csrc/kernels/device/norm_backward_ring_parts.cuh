// What norm_backward_ring.cuh and norm_backward_pieces.cuh have of a row and of its columns: parts of rows in shared
// memory, weights, masks, sums.
#pragma once

#include "kept.cuh"
#include "norm_backward_rows.cuh"
#include "waiting.cuh"

namespace fuseline {

// Bytes (as for copy_in) that will be read soon, to the L2.
__device__ __forceinline__ void prefetch(const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
#endif
}

// What all lanes of a warp have, known to be the same: addresses and branches made of it are the warp's, not each lane's.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(kAllLanes, value, 0); }

// Sends for columns from .. from + kColumns of a row; one lane calls, first to prepare: that reads by elements what shares
// its vector with memory outside the tensor, and answers how many bytes will come in copies.
template <class T, int kColumns, bool kShifted>
__device__ __forceinline__ int fetch_part(const NormBackward& a, const void* tensor, int64_t row, int from,
                                          unsigned char* to, uint64_t* arrived, bool prepare) {
  const int n = int(a.n), to_column = min(from + kColumns, n);
  if (from >= to_column) return 0;
  const T* const all = static_cast<const T*>(tensor);
  const T* const at = all + row * a.n;
  if constexpr (!kShifted) {
    const int bytes = (to_column - from) * int(sizeof(T));
    if (!prepare) copy_in(to, at + from, bytes, arrived);
    return bytes;
  } else {
    const int head = elements_into_vector(at + from);
    int first = from - head;  // element that the first vector begins with
    int count = (to_column - first + kVector<T> - 1) / kVector<T>;
    uint4* slots = reinterpret_cast<uint4*>(to);
    const bool opens = row == 0 && first < 0;
    const bool ends = row == a.rows - 1 && first + count * kVector<T> > n;
    if (prepare && (opens || ends)) {
      if (opens) slots[0] = load_vector<T, false>(at, first, n, false);
      if (ends) slots[count - 1] = load_vector<T, false>(at, first + (count - 1) * kVector<T>, n, false);
      show_to_copies();  // copies take its place later
    }
    if (opens) ++slots, first += kVector<T>, --count;
    if (ends && count > 0) --count;
    if (!prepare && count > 0) copy_in(slots, at + first, count * 16, arrived);
    return count * 16;
  }
}

// So many bytes from element `at` on; of what is shifted all vectors that they stand in, which at a tensor's ends have up to
// 15 bytes of others: never another page of memory, and no column takes them.
template <class T, bool kShifted>
struct Span {
  const unsigned char* first;
  int bytes;

  __device__ __forceinline__ Span(const void* tensor, int64_t at, int wanted)
      : first(static_cast<const unsigned char*>(tensor) + at * int64_t(sizeof(T))), bytes(wanted) {
    if constexpr (kShifted) {
      const int head = int(reinterpret_cast<uintptr_t>(first) % 16);
      first -= head;
      bytes = wanted > 0 ? (head + wanted + 15) / 16 * 16 : 0;
    }
  }
};

// A slot of a row out of shared memory: vectors `at` .. of the warp's part.
template <class T, int kSize, bool kShifted>
__device__ __forceinline__ HeldSlot<T, kSize, kShifted> take_slot(const unsigned char* part, int slot) {
  using Held = HeldSlot<T, kSize, kShifted>;
  const uint4* const at = reinterpret_cast<const uint4*>(part) + slot * Held::kVectors;
  Held held;
#pragma unroll
  for (int v = 0; v < Held::kVectors + (kShifted ? 1 : 0); ++v) held.raw[v] = at[v];
  return held;
}

// The weights of this thread's slots, kept in shared memory as they are stored; ones where there are none. kThreads: between
// which they stand, or 0 for a block's.
template <class Kind, int kThreads = 0>
struct RingWeights {
  static constexpr int kSize = Kind::kSize;
  uint4* at;  // of this thread
  bool fp32;

  __device__ __forceinline__ static int step() { return kThreads ? kThreads : int(blockDim.x); }

  __device__ __forceinline__ void keep(const NormBackward& a, int slot, int first) const {
    float weight[kSize];
    weights_of_columns<typename Kind::Y, Kind::kShifted>(a, first, weight);
    put(slot, weight);
  }

  __device__ __forceinline__ void put(int slot, const float (&weight)[kSize]) const {
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

  // The same for columns first, first + kWarp, ..
  __device__ __forceinline__ void keep_apart(const NormBackward& a, int slot, int first) const {
    float weight[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int c = first + i * kWarp;
      weight[i] = c >= int(a.n) ? 0.f : a.weight ? weight_at<typename Kind::Y>(a.weight, a.fp32_weights, c) : 1.f;
    }
    put(slot, weight);
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
