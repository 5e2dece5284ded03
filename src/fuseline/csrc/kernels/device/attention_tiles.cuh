// Tiles of rows in shared memory, and their products by the warp: tensor cores for 16-bit elements, exact FMAs for fp32.
//
// A tile row takes kD elements and 16 bytes more, so that eight rows begin in different banks. A warp has 16 * kM rows of a
// product; sums lie with its lanes as mma.cuh says for D, whatever the element: with group = lane / 4 and quad = lane % 4,
// d[m][n] holds rows 16 m + group and + 8, columns 8 n + 2 quad and + 1.
#pragma once

#include "mma.cuh"
#include "vector.cuh"

namespace fuseline {

template <class T, int kD>
constexpr int kPitch = kD + 16 / int(sizeof(T));

// 16 bytes of shared memory: `count` from global memory, zeros behind them. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int count) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
               "r"(count)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

struct InPlace {
  static __device__ __forceinline__ constexpr int slot(int row) { return row; }
};

// Begins to copy kRows rows, a share of each of kThreads neighbours, row r to row Order::slot(r) of the tile; zeros stand
// where there are none, and behind head_dim.
template <class T, int kRows, int kD, int kThreads, class Order = InPlace>
__device__ __forceinline__ void copy_tile(T* tile, const T* from, int64_t stride, int rows, int head_dim) {
  constexpr int kWide = 16 / int(sizeof(T)), kVectors = kD / kWide, kStep = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0 && kRows % kStep == 0);
  unsigned thread;  // asked for anew, so that what follows from it holds no registers between copies
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread %= kThreads;
  const int first = int(thread / kVectors), column = int(thread % kVectors) * kWide;
  rows = column < head_dim ? rows : 0;
  from += first * stride + column;
  T* const to = tile + Order::slot(first) * kPitch<T, kD> + column;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    copy_bytes(to + Order::slot(row) * kPitch<T, kD>, from, first + row < rows ? 16 : 0);
    from += kStep * stride;
  }
}

// The A operands of 16 rows and 16 columns of a tile.
template <class T, int kD>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, tile + (row + lane % 16) * kPitch<T, kD> + column + lane / 16 * 8);
}

// The B operands for tile rows as columns of B: b[0], b[1] for the first 8 of 16 rows, b[2], b[3] for the others.
template <class T, int kD>
__device__ __forceinline__ void load_b_rows(uint32_t (&b)[4], const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, tile + (row + lane % 8 + lane / 16 * 8) * kPitch<T, kD> + column + lane / 8 % 2 * 8);
}

// The B operands for tile rows as rows of B: b[0], b[1] for the first 8 of 16 columns, b[2], b[3] for the others.
template <class T, int kD>
__device__ __forceinline__ void load_b_columns(uint32_t (&b)[4], const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(b, tile + (row + lane % 16) * kPitch<T, kD> + column + lane / 16 * 8);
}

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&d)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[m][n][e] = 0.f;
}

// d = A * B^T over kD columns; the tiles begin at the warp's first row of A and at the first row of B.
template <class T, int kD, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&d)[kM][kN][4], const T* a, const T* b) {
  set_zero(d);
  if constexpr (std::is_same_v<T, float>) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const float* a_row = a + group * kPitch<T, kD>;
    const float* b_row = b + 2 * quad * kPitch<T, kD>;
#pragma unroll 2
    for (int column = 0; column < kD; column += 4) {
      float4 left[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          left[m][half] =
              *reinterpret_cast<const float4*>(a_row + (16 * m + 8 * half) * kPitch<T, kD> + column);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 right = *reinterpret_cast<const float4*>(b_row + (8 * n + e) * kPitch<T, kD> + column);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& sum = d[m][n][2 * half + e];
              sum = fmaf(left[m][half].x, right.x, sum);
              sum = fmaf(left[m][half].y, right.y, sum);
              sum = fmaf(left[m][half].z, right.z, sum);
              sum = fmaf(left[m][half].w, right.w, sum);
            }
        }
    }
  } else {
#pragma unroll
    for (int column = 0; column < kD; column += 16) {
      uint32_t left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_a<T, kD>(left[m], a, 16 * m, column);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t right[4];
        load_b_rows<T, kD>(right, b, 8 * n, column);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16816<T>(d[m][n], left[m], right[0], right[1]);
          mma_16816<T>(d[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }
}

// d += P * B: P with the lanes (16 kM rows, 8 kK columns, rounded to T), B a tile of 8 kK rows.
template <class T, int kD, int kM, int kK>
__device__ __forceinline__ void multiply_columns(float (&d)[kM][kD / 8][4], const float (&p)[kM][kK][4], const T* b) {
  if constexpr (std::is_same_v<T, float>) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
    for (int k = 0; k < kK; ++k) {
#pragma unroll 1
      for (int owner = 0; owner < 4; ++owner) {
        const float* row = b + (8 * k + 2 * owner) * kPitch<T, kD> + 2 * quad;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float left[kM][2];
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              left[m][half] = __shfl_sync(0xffffffffu, p[m][k][2 * half + e], (lane & ~3) | owner);
#pragma unroll
          for (int n = 0; n < kD / 8; ++n) {
            const float2 right = *reinterpret_cast<const float2*>(row + e * kPitch<T, kD> + 8 * n);
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                d[m][n][2 * half] = fmaf(left[m][half], right.x, d[m][n][2 * half]);
                d[m][n][2 * half + 1] = fmaf(left[m][half], right.y, d[m][n][2 * half + 1]);
              }
          }
        }
      }
    }
  } else {
    static_assert(kK % 2 == 0);
#pragma unroll
    for (int k = 0; k < kK; k += 2) {
      uint32_t left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        left[m][0] = pack_pair<T>(p[m][k][0], p[m][k][1]);
        left[m][1] = pack_pair<T>(p[m][k][2], p[m][k][3]);
        left[m][2] = pack_pair<T>(p[m][k + 1][0], p[m][k + 1][1]);
        left[m][3] = pack_pair<T>(p[m][k + 1][2], p[m][k + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kD / 8; n += 2) {
        uint32_t right[4];
        load_b_columns<T, kD>(right, b, 8 * k, 8 * n);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16816<T>(d[m][n], left[m], right[0], right[1]);
          mma_16816<T>(d[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
  }
}

// Writes a warp's rows of sums times `factor` (of each lane's rows) to memory, through its own rows of a tile: row
// Order::slot(r) of the sums as row r.
template <class T, int kD, int kM, class Order = InPlace>
__device__ __forceinline__ void store_rows(const float (&d)[kM][kD / 8][4], const float (&factor)[kM][2], T* tile, T* to,
                                           int64_t stride, int rows, int head_dim) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        T* at = tile + (16 * m + 8 * half + group) * kPitch<T, kD> + 8 * n + 2 * quad;
        const float x = d[m][n][2 * half] * factor[m][half], y = d[m][n][2 * half + 1] * factor[m][half];
        if constexpr (std::is_same_v<T, float>) {
          *reinterpret_cast<float2*>(at) = make_float2(x, y);
        } else {
          *reinterpret_cast<uint32_t*>(at) = pack_pair<T>(x, y);
        }
      }
  __syncwarp();
  constexpr int kWide = 16 / int(sizeof(T)), kVectors = kD / kWide;
#pragma unroll 4
  for (int at = lane; at < 16 * kM * kVectors; at += 32) {
    const int row = at / kVectors, column = at % kVectors * kWide;
    if (row < rows && column < head_dim) {
      *reinterpret_cast<uint4*>(to + row * stride + column) =
          *reinterpret_cast<const uint4*>(tile + Order::slot(row) * kPitch<T, kD> + column);
    }
  }
}

// Zeros for rows that nothing reaches.
template <class T, int kThreads>
__device__ __forceinline__ void store_zeros(T* to, int64_t stride, int rows, int head_dim) {
  constexpr int kWide = 16 / int(sizeof(T));
  const int vectors = head_dim / kWide;
  for (int at = threadIdx.x; at < rows * vectors; at += kThreads) {
    *reinterpret_cast<uint4*>(to + int64_t(at / vectors) * stride + at % vectors * kWide) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace fuseline
