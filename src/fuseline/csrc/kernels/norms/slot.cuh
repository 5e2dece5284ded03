// A slot: neighbouring elements that a thread takes at a time, 16 bytes of the narrower of a kernel's two dtypes, and so
// one vector or two of a tensor.
#pragma once

#include "device/vector.cuh"

namespace fuseline {

template <class T, int kSize>
struct Slot {
  static constexpr int kVectors = kSize / kVector<T>;
  static_assert(kVectors >= 1);
  uint4 raw[kVectors];

  __device__ __forceinline__ void values(float (&out)[kSize]) const {
    float part[kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unpack<T>(raw[v], part);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) out[v * kVector<T> + i] = part[i];
    }
  }

  __device__ __forceinline__ void set(const float (&values)[kSize]) {
    float part[kVector<T>];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) part[i] = values[v * kVector<T> + i];
      raw[v] = pack<T>(part);
    }
  }

  // What the slot holds is taken anew, rather than kept unpacked.
  __device__ __forceinline__ void forget_values() {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) forget(raw[v]);
  }

  // As load_vector: elements first .. first + kSize of a row, zero where outside 0 .. limit.
  template <bool kAligned, class Index>
  __device__ __forceinline__ void load(const T* row, Index first, Index limit, bool vectors) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      raw[v] = load_vector<T, kAligned>(row, Index(first + v * kVector<T>), limit, vectors);
    }
  }
};

// As store_vector.
template <class T, bool kAligned, int kSize, class Index>
__device__ __forceinline__ void store_slot(T* row, Index first, Index n, bool vectors, const float (&values)[kSize]) {
  float part[kVector<T>];
#pragma unroll
  for (int v = 0; v < kSize / kVector<T>; ++v) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) part[i] = values[v * kVector<T> + i];
    store_vector<T, kAligned>(row, Index(first + v * kVector<T>), n, vectors, part);
  }
}

// kSize elements of T in one access of 8 or 16 bytes, or what there is of them: the elements first .. of a row, zero where
// outside 0 .. limit. `vectors`: row + first is a multiple of their bytes.
template <class T, int kSize>
struct RowPart {
  static constexpr int kBytes = kSize * int(sizeof(T));
  static_assert(kBytes == 8 || kBytes == 16);
  uint32_t words[kBytes / 4];

  __device__ __forceinline__ void values(float (&out)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack_pair<T>(words[i]);
        out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void set(const float (&values)[kSize]) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(values[i]);
      } else {
        words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
      }
    }
  }

  // From and to memory that is a multiple of its bytes.
  __device__ __forceinline__ void take(const void* from) {
    if constexpr (kBytes == 16) {
      const uint4 raw = *static_cast<const uint4*>(from);
      words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    } else {
      const uint2 raw = *static_cast<const uint2*>(from);
      words[0] = raw.x, words[1] = raw.y;
    }
  }
  __device__ __forceinline__ void put(void* to) const {
    if constexpr (kBytes == 16) {
      *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }

  template <class Index>
  __device__ __forceinline__ void load(const T* row, Index first, Index limit, bool vectors) {
    if (vectors && first >= 0 && first + kSize <= limit) {
      take(row + first);
      return;
    }
    float values[kSize] = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= 0 && first + i < limit) values[i] = to_float(row[first + i]);
    }
    set(values);
  }

  template <class Index>
  __device__ __forceinline__ void store(T* row, Index first, Index limit, bool vectors) const {
    if (vectors && first >= 0 && first + kSize <= limit) {
      put(row + first);
      return;
    }
    float out[kSize];
    values(out);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= 0 && first + i < limit) row[first + i] = from_float<T>(out[i]);
    }
  }

  // Whether the parts of a row that start `head` elements before it stand at multiples of their bytes.
  static __device__ __forceinline__ bool in_place(const T* row, int head) {
    return reinterpret_cast<uintptr_t>(row - head) % kBytes == 0;
  }
};

// Whether the slots of a row, which start `head` elements before it, stand in whole vectors of memory.
template <class T>
__device__ __forceinline__ bool in_vectors(const T* row, int head) {
  return reinterpret_cast<uintptr_t>(row - head) % 16 == 0;
}

}  // namespace fuseline
