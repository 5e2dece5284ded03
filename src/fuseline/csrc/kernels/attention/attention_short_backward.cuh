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
// Where query heads share a head of keys, each leaves its own grad_k and grad_v, rounded, and attention_short_groups.cu adds
// them up.
//
// Threads: a warp has 16 queries until it has their grad_q, and then the 16 keys of the same number, for which it reads
// the columns of p and grad_s that the block's warps have left in shared memory. The next problem's tensors are fetched
// as the room of this one's is free.
#pragma once

#include "attention_short_gradients.cuh"
#include "attention_short_launch.cuh"
#include "attention_short_products.cuh"

namespace fuseline::short_attention {

// Blocks that a multiprocessor has registers for, and of the largest problems shared memory: 227 KB, 163 before sm_90.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kWidestOfTwo = 32;
#else
constexpr int kWidestOfTwo = 64;
#endif
template <int kS, int kD>
constexpr int kBackwardBlocks = kS == 128              ? (kD > kWidestOfTwo ? 1 : 2)
                                : kS == 64 && kD == 128 ? 2
                                                        : (kD == 32 ? 20 : 16) / (kS / 16);

// sums[16, kD] = left[kS, columns row .. + 16]^T * right[kS, kD]; of a `marked` left side without the marked, and without
// what stands outside of `blocks` if some are skipped.
template <class T, int kS, int kD, bool kSkips>
__device__ __forceinline__ void multiply_columns(float (&sums)[kD / 8][4], const Tile<kS>& left, const Tile<kD>& right,
                                                 bool marked, uint32_t blocks, const Place& place) {
  const uint32_t left_at = left.chunk(place.lane % 8 + place.lane / 16 * 8, place.row / 8 + place.lane / 8 % 2);
  clear(sums);
#pragma unroll (kSteps<kS, kD>)
  for (int k = 0; k < kS / 16; ++k) {
    if (kSkips && !(blocks & 1u << k)) continue;
    uint32_t a[4];
    load_matrices_transposed(a, left.rows_on(left_at, 16 * k));
    if (marked) {
#pragma unroll
      for (int w = 0; w < 4; ++w) a[w] &= ~((a[w] >> 15 & 0x00010001u) * 0xffffu);
    }
    multiply_block<T, kD>(sums, a, right, k, place);
  }
}

// ---- kernel ----

// kSkips: the products leave out blocks of 16 x 16 that are hidden as a whole.
template <class T, int kS, int kD, bool kSkips, bool kPacked>
__global__ void __launch_bounds__(2 * kS, kBackwardBlocks<kS, kD>) short_backward(const ShortAttention a) {
  extern __shared__ __align__(1024) uint4 memory[];
  constexpr int kTile = kS * kD * 2, kRoom = kS * kS * 2;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  constexpr bool kAheadQ = Held<kS, kD>::kQueriesAhead, kAheadGrad = Held<kS, kD>::kGradientsAhead;
  const Tile<kD> k{base}, v{base + kTile};
  Turns turns{base + Held<kS, kD>::kBackwardBytes - Turns::kBytes};
  const Blocks<kS, kSkips> blocks{turns.at - Blocks<kS, kSkips>::kBytes};
  // Tensors that have two places change them every turn; `ahead`: where the next problem's stands.
  const auto q = [&](bool ahead = false) { return Tile<kD>{base + (kAheadQ && turns.odd() != ahead ? 4 : 2) * kTile}; };
  const auto grad_out = [&](bool ahead = false) {
    return Tile<kD>{base + (kAheadGrad && turns.odd() != ahead ? 5 : 3) * kTile};
  };
  const Tile<kS> room{base + (4 + kAheadQ + kAheadGrad) * kTile}, grad_room{room.base + (Held<kS, kD>::kOneRoom ? 0 : kRoom)};
  const auto fetch_one = [&](const Tile<kD>& to, const ShortTensor& tensor, int problem) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS>(to, tensor, head_of(a, problem), extent.first_row, extent.rows, a.head_dim);
    }
    commit_copies();
  };
  const auto fetch_keys = [&](const Tile<kD>& to, const ShortTensor& tensor, int problem) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS>(to, tensor, keys_of(a, problem), extent.first_key, extent.keys, a.head_dim);
    }
    commit_copies();
  };
  const auto extent = [&] { return extent_of<kPacked>(a, turns.problem()); };
  wait_for_earlier();
  fetch_keys(k, a.k, blockIdx.x);
  fetch_keys(v, a.v, blockIdx.x);
  fetch_one(grad_out(), a.grad_out, blockIdx.x);
  fetch_one(q(), a.q, blockIdx.x);
  turns.begin(a);
  blocks.begin(a, Place::here<kS>());
  let_next_start();
  if constexpr (kPacked) clear_gradients_behind<T>(a);
  do {
    wait_for_all();
    meet<kS>();
    const int asked = turns.ask(a);
    if constexpr (kAheadQ) fetch_one(q(true), a.q, turns.next());
    if constexpr (kAheadGrad) fetch_one(grad_out(true), a.grad_out, turns.next());
    uint32_t grad_s[kS / 16][4];
    {
      float p[kS / 8][4];
      multiply_rows<T, kD, kS, kSkips>(p, q(), k, blocks.keys(Place::here<kS>()), Place::here<kS>());
      turns.answer(a, asked);
      const RowSums sums = exponentials<T, kS, kSkips, (kS < kLongest), kPacked>(p, a, turns.problem(), extent(), Place::here<kS>());
      normalize<T, kS>(p, sums, grad_s);
      if (a.dropout.seed) {
        uint32_t kept[2];
        kept_by_dropout<kS, kPacked>(kept, a, turns.problem(), extent(), Place::here<kS>());
        mark<kS>(grad_s, kept);
      }
      leave<kS>(grad_s, room, Place::here<kS>());  // p
      __syncwarp();
      float grad_lse[2] = {0.f, 0.f};
      if (a.grad_lse) load_rows<kPacked>(grad_lse, a, turns.problem(), extent(), Place::here<kS>());
      const uint32_t seen = blocks.keys(Place::here<kS>());
      multiply_rows<T, kD, kS, kSkips>(p, grad_out(), v, seen, Place::here<kS>());  // the gradient of p
      if (a.dropout.seed) {
        through_softmax<T, kS, true>(p, grad_s, grad_lse, room, a.dropout.scale, Place::here<kS>());
      } else {
        through_softmax<T, kS, false>(p, grad_s, grad_lse, room, 1.f, Place::here<kS>());
      }
    }
    if constexpr (!Held<kS, kD>::kOneRoom) leave<kS>(grad_s, grad_room, Place::here<kS>());
    float sums[kD / 8][4];
    const auto store_problem = [&](const ShortTensor& tensor, float factor, int start, int rows) {
      store_rows<T, kD>(sums, factor, factor, tensor, a, turns.problem(), start, rows, Place::here<kS>());
    };
    if (a.grad_q.at) {
      multiply_held<T, kS, kD, kSkips>(sums, grad_s, k, blocks.keys(Place::here<kS>()), Place::here<kS>());
      store_problem(a.grad_q, a.scale, extent().first_row, extent().rows);
    }
    meet<kS>();
    fetch_keys(k, a.k, turns.next());
    fetch_keys(v, a.v, turns.next());
    if (a.grad_v.at) {
      const float factor = a.dropout.seed ? a.dropout.scale : 1.f;
      const uint32_t seen = blocks.rows(Place::here<kS>());
      multiply_columns<T, kS, kD, kSkips>(sums, room, grad_out(), a.dropout.seed, seen, Place::here<kS>());
      store_problem(a.grad_v, factor, extent().first_key, extent().keys);
    }
    if constexpr (Held<kS, kD>::kOneRoom) {
      meet<kS>();
      if constexpr (!kAheadGrad) fetch_one(grad_out(), a.grad_out, turns.next());
      leave<kS>(grad_s, grad_room, Place::here<kS>());
      meet<kS>();
    }
    if (a.grad_k.at) {
      const uint32_t seen = blocks.rows(Place::here<kS>());
      multiply_columns<T, kS, kD, kSkips>(sums, grad_room, q(), false, seen, Place::here<kS>());
    }
    if constexpr (!kAheadQ) {
      meet<kS>();
      fetch_one(grad_out(), a.grad_out, turns.next());
      fetch_one(q(), a.q, turns.next());
    }
    if (a.grad_k.at) store_problem(a.grad_k, a.scale, extent().first_key, extent().keys);
    turns.advance();
  } while (turns.problem() < a.problems);
}

// ---- launcher ----

template <class T, int kS>
int backward_of(const ShortAttention& a, const AttentionPlan& plan, void* stream) {
  const auto go = [&](void (*kernel)(ShortAttention)) { return launch_problems(kernel, a, plan.launches[0], stream); };
  return with_size<32, kWidest>(plan.form.width, [&](auto width) {
    if constexpr (kS == kPackedWarps) {
      if (a.starts_q != nullptr) return go(short_backward<T, kS, width(), false, true>);
    }
    if constexpr (kS == kLongest) {
      if (plan.form.skips) return go(short_backward<T, kS, width(), true, false>);
    }
    return go(short_backward<T, kS, width(), false, false>);
  });
}

}  // namespace fuseline::short_attention
