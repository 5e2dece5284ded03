// The gradients of attention over short sequences (attention_short_backward.cuh): what happens to a warp's 16 rows of p and of
// its gradient between the products.
#pragma once

#include "attention_short_scores.cuh"

namespace fuseline::short_attention {

// Probabilities as the left side of a product.
template <class T, int kS>
__device__ __forceinline__ void normalize(const float (&p)[kS / 8][4], const RowSums& sums,
                                          uint32_t (&packed)[kS / 16][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = sums.sum[half] == 0.f ? 0.f : fast_reciprocal(sums.sum[half]);
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) {
      packed[i / 2][i % 2 * 2 + half] = pack_pair<T>(p[i][2 * half] * factor, p[i][2 * half + 1] * factor);
    }
  }
}

// Marks what dropout drops of p by its sign.
template <int kS>
__device__ __forceinline__ void mark(uint32_t (&packed)[kS / 16][4], const uint32_t (&kept)[2]) {
#pragma unroll
  for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[i / 2][i % 2 * 2 + half] |=
          (has_bit(kept[half], i, 0) ? 0u : 0x00008000u) | (has_bit(kept[half], i, 1) ? 0u : 0x80000000u);
    }
  }
}

// Four matrices of 8 x 8 from the lanes to shared memory, as load_matrices takes them from there.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Leaves the warp's rows, packed as the left side of a product, in shared memory.
template <int kS, class Room>
__device__ __forceinline__ void leave(const uint32_t (&packed)[kS / 16][4], const Room& room, const Place& place) {
#if __CUDA_ARCH__ >= 900
  const uint32_t at = room.chunk(place.row + place.lane % 16, place.lane / 16);
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) store_matrices(room.chunks_on(at, 2 * k), packed[k]);
#else
  const uint32_t at = room.chunk(place.row + place.group, 0) + place.quad * 4;
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t to = room.rows_on(room.chunks_on(at, 2 * k + w / 2), w % 2 * 8);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(packed[k][w]) : "memory");
    }
  }
#endif
}

template <bool kPacked>
__device__ __forceinline__ void load_rows(float (&grad_lse)[2], const ShortAttention& a, int problem, const Extent& extent,
                                          const Place& place) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + place.group + 8 * half;
    if (row < extent.rows) grad_lse[half] = a.grad_lse[statistic_of<kPacked>(a, problem, extent) + row];
  }
}

// grad_p becomes grad_s, packed as the left side of a product. p is read twice: to keep it would take too many registers.
template <class T, int kS, bool kDropout, class Room>
__device__ __forceinline__ void through_softmax(float (&grad_p)[kS / 8][4], uint32_t (&grad_s)[kS / 16][4],
                                                const float (&grad_lse)[2], const Room& room, float scale,
                                                const Place& place) {
  const uint32_t row = room.chunk(place.row + place.lane % 16, place.lane / 16);
  float sum[2] = {0.f, 0.f}, products[2] = {0.f, 0.f}, delta[2];
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) {
    uint32_t words[4];
    load_matrices(words, room.chunks_on(row, 2 * k));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 p = unpack_pair<T>(kDropout ? words[w] & 0x7fff7fffu : words[w]);
      float(&grads)[4] = grad_p[2 * k + w / 2];
      if constexpr (kDropout) {
        grads[w % 2 * 2] *= words[w] & 0x00008000u ? 0.f : scale;
        grads[w % 2 * 2 + 1] *= words[w] & 0x80000000u ? 0.f : scale;
      }
      sum[w % 2] += p.x + p.y;
      products[w % 2] = fmaf(p.x, grads[w % 2 * 2], fmaf(p.y, grads[w % 2 * 2 + 1], products[w % 2]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = quad_sum(sum[half]);
    products[half] = quad_sum(products[half]);
    delta[half] = (sum[half] == 0.f ? 0.f : products[half] * fast_reciprocal(sum[half])) - grad_lse[half];
  }
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) {
    uint32_t words[4];
    load_matrices(words, room.chunks_on(row, 2 * k));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 p = unpack_pair<T>(kDropout ? words[w] & 0x7fff7fffu : words[w]);
      const float(&grads)[4] = grad_p[2 * k + w / 2];
      grad_s[k][w] = pack_pair<T>(p.x * (grads[w % 2 * 2] - delta[w % 2]), p.y * (grads[w % 2 * 2 + 1] - delta[w % 2]));
    }
  }
}

// Zeros in the gradients of what no packed sequence has.
template <class T>
__device__ __forceinline__ void clear_gradients_behind(const ShortAttention& a) {
  const int key = start_of(a.starts_k, a.sequences);
  clear_behind<T>(a, a.grad_q, start_of(a.starts_q, a.sequences), a.total_q);
  clear_behind<T>(a, a.grad_k, key, a.total_k);
  clear_behind<T>(a, a.grad_v, key, a.total_k);
}

}  // namespace fuseline::short_attention
