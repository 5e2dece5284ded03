// The gradients of attention over short sequences, from q, k, v and grad_out alone.
//
//   p = softmax(scale * q k^T + mask), rounded to 16 bits; z its dropout
//   grad_v = (p * z)^T grad_out
//   grad_p = z * (grad_out v^T),  delta = sum(p * grad_p) / sum(p) of each row
//   grad_s = p * (grad_p - delta + grad_lse),  grad_q = scale * grad_s k,  grad_k = scale * grad_s^T q
// The division makes up for the rounding of p, after which a row does not sum to 1.
//
// Moves: q, k, v, grad_out read once, three gradients written once. Does: 10 T S D operations a problem on tensor cores.
// Limit: HBM bandwidth, and at 128 x 128 reading shared memory nearly as long.
//
// Threads: a warp has 16 queries until it has their grad_q, and then the 16 keys of the same number, for which it reads
// the columns of p and grad_s that the block's warps have left in shared memory. The next problem's tensors are fetched
// as the room of this one's is free.
#pragma once

#include "attention_short.cuh"

namespace fuseline {

// Problems of 128 x 128 have one room for p and grad_s, in turn.
template <int kS>
constexpr bool kOneRoom = kS == 128;

template <int kS, int kD>
constexpr int kBackwardBytes = 4 * kS * kD * 2 + (kOneRoom<kS> ? 1 : 2) * kS * kS * 2;

// Blocks that a multiprocessor has registers for.
template <int kS, int kD>
constexpr int kBackwardBlocks = kS == 128 ? (kD == 128 ? 1 : 2) : (kD == 32 ? 20 : 16) / (kS / 16);

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

// Makes grad_p that of the probabilities before their dropout.
template <int kS>
__device__ __forceinline__ void drop(float (&grad_p)[kS / 8][4], const uint32_t (&kept)[2], float scale) {
#pragma unroll
  for (int i = 0; i < kS / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) grad_p[i][e] *= has_bit(kept[e / 2], i, e % 2) ? scale : 0.f;
  }
}

// Leaves packed rows in shared memory.
template <int kS>
__device__ __forceinline__ void leave(const uint32_t (&packed)[4], const Tile<kS>& room, int k, const Place& place) {
  store_matrices(packed, room.chunk(place.row + place.lane % 16, 2 * k + place.lane / 16),
                 [&](int w) { return &room.pair(place.row + place.group + w % 2 * 8, 2 * k + w / 2, place.quad); });
}

template <int kS>
__device__ __forceinline__ void leave_all(const uint32_t (&packed)[kS / 16][4], const Tile<kS>& room,
                                          const Place& place) {
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) leave<kS>(packed[k], room, k, place);
}

// Makes the warp's rows of p in shared memory those that are left of them.
template <int kS>
__device__ __forceinline__ void drop(const Tile<kS>& room, const uint32_t (&kept)[2], const Place& place) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) {
      room.pair(place.row + place.group + 8 * half, i, place.quad) &=
          (has_bit(kept[half], i, 0) ? 0x0000ffffu : 0u) | (has_bit(kept[half], i, 1) ? 0xffff0000u : 0u);
    }
  }
}

__device__ __forceinline__ void load_rows(float (&grad_lse)[2], const ShortAttention& a, int problem,
                                          const Place& place) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + place.group + 8 * half;
    if (row < a.seqlen_q) grad_lse[half] = a.grad_lse[int64_t(problem) * a.seqlen_q + row];
  }
}

// grad_p becomes grad_s, packed as the left side of a product. p is read twice: to keep it would take too many registers.
template <class T, int kS>
__device__ __forceinline__ void through_softmax(const float (&grad_p)[kS / 8][4], uint32_t (&grad_s)[kS / 16][4],
                                                const float (&grad_lse)[2], const Tile<kS>& room, const Place& place) {
  float sum[2] = {0.f, 0.f}, products[2] = {0.f, 0.f}, delta[2];
#pragma unroll
  for (int k = 0; k < kS / 16; ++k) {
    uint32_t words[4];
    load_matrices(words, room.chunk(place.row + place.lane % 16, 2 * k + place.lane / 16));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 p = unpack_pair<T>(words[w]);
      const float(&grads)[4] = grad_p[2 * k + w / 2];
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
    load_matrices(words, room.chunk(place.row + place.lane % 16, 2 * k + place.lane / 16));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 p = unpack_pair<T>(words[w]);
      const float(&grads)[4] = grad_p[2 * k + w / 2];
      grad_s[k][w] = pack_pair<T>(p.x * (grads[w % 2 * 2] - delta[w % 2]), p.y * (grads[w % 2 * 2 + 1] - delta[w % 2]));
    }
  }
}

// ---- kernel ----

template <class T, int kS, int kD>
__global__ void __launch_bounds__(2 * kS, kBackwardBlocks<kS, kD>) short_backward(const ShortAttention a) {
  extern __shared__ uint4 memory[];
  constexpr int kTile = kS * kD * 2, kRoom = kS * kS * 2;
  unsigned char* const base = reinterpret_cast<unsigned char*>(memory);
  const Tile<kD> q{base}, k{base + kTile}, v{base + 2 * kTile}, grad_out{base + 3 * kTile};
  const Tile<kS> room{base + 4 * kTile}, grad_room{base + 4 * kTile + (kOneRoom<kS> ? 0 : kRoom)};
  const auto fetch_one = [&](const Tile<kD>& to, const ShortTensor& tensor, int problem, int rows) {
    if (problem < a.problems) fetch<T, kS>(to, tensor, head_of(a, problem), rows, a.head_dim);
    commit_copies();
  };
  fetch_one(k, a.k, blockIdx.x, a.seqlen_k);
  fetch_one(v, a.v, blockIdx.x, a.seqlen_k);
  fetch_one(grad_out, a.grad_out, blockIdx.x, a.seqlen_q);
  fetch_one(q, a.q, blockIdx.x, a.seqlen_q);
  for (int problem = blockIdx.x; problem < a.problems; problem += gridDim.x) {
    wait_for_all();
    meet<kS>();
    uint32_t grad_s[kS / 16][4];
    {
      float p[kS / 8][4];
      multiply_rows<T, kD, kS>(p, q, k, Place::here());
      const RowSums sums = exponentials<T, kS>(p, a, problem, Place::here());
      normalize<T, kS>(p, sums, grad_s);
      leave_all<kS>(grad_s, room, Place::here());  // p
      __syncwarp();
      uint32_t kept[2];
      if (a.dropout.seed) kept_by_dropout<kS>(kept, a, problem, Place::here());
      float grad_lse[2] = {0.f, 0.f};
      if (a.grad_lse) load_rows(grad_lse, a, problem, Place::here());
      multiply_rows<T, kD, kS>(p, grad_out, v, Place::here());  // the gradient of p
      if (a.dropout.seed) drop<kS>(p, kept, a.dropout.scale);
      through_softmax<T, kS>(p, grad_s, grad_lse, room, Place::here());
      if (a.dropout.seed) {
        __syncwarp();
        drop<kS>(room, kept, Place::here());
      }
    }
    if constexpr (!kOneRoom<kS>) leave_all<kS>(grad_s, grad_room, Place::here());
    float sums[kD / 8][4];
    if (a.grad_q.at) {
      multiply_held<T, kS, kD>(sums, grad_s, k, Place::here());
      store_rows<T, kD>(sums, a.scale, a.scale, a.grad_q, a, problem, a.seqlen_q, Place::here());
    }
    meet<kS>();
    const int next = problem + gridDim.x;
    fetch_one(k, a.k, next, a.seqlen_k);
    fetch_one(v, a.v, next, a.seqlen_k);
    if (a.grad_v.at) {
      const float factor = a.dropout.seed ? a.dropout.scale : 1.f;
      multiply_columns<T, kS, kD>(sums, room, grad_out, Place::here());
      store_rows<T, kD>(sums, factor, factor, a.grad_v, a, problem, a.seqlen_k, Place::here());
    }
    if constexpr (kOneRoom<kS>) {
      meet<kS>();
      fetch_one(grad_out, a.grad_out, next, a.seqlen_q);
      leave_all<kS>(grad_s, grad_room, Place::here());
      meet<kS>();
    }
    if (a.grad_k.at) multiply_columns<T, kS, kD>(sums, grad_room, q, Place::here());
    meet<kS>();
    if constexpr (!kOneRoom<kS>) fetch_one(grad_out, a.grad_out, next, a.seqlen_q);
    fetch_one(q, a.q, next, a.seqlen_q);
    if (a.grad_k.at) store_rows<T, kD>(sums, a.scale, a.scale, a.grad_k, a, problem, a.seqlen_k, Place::here());
  }
}

// ---- launcher ----

template <class T>
int short_backward_of(const ShortAttention& a, const Device& device, void* stream) {
  return with_tiles(a, [&](auto length, auto head_dim) {
    constexpr int kS = decltype(length)::value, kD = decltype(head_dim)::value;
    return launch_problems(short_backward<T, kS, kD>, a, 2 * kS, kBackwardBytes<kS, kD>, device, stream);
  });
}

}  // namespace fuseline
