// attention_short_backward.cuh for problems of up to 128 rows and keys on Hopper, by products of warpgroups.
//
// Threads: a warpgroup has 64 queries until it has their grad_q, and then the 64 keys of the same numbers, for which its
// products read the columns of p and grad_s that both have left in shared memory.
#pragma once

#include "attention_short_gradients.cuh"
#include "attention_short_wgmma.cuh"

namespace fuseline::short_attention {

// p without what dropout has marked, where the warp's rows of it stand.
__device__ __forceinline__ void take_off_marked(const Panels<kLongest, kLongest>& room, const Place& place) {
  const uint32_t row = room.chunk(place.row + place.lane % 16, place.lane / 16);
#pragma unroll 1
  for (int k = 0; k < kLongest / 16; ++k) {
    const uint32_t at = room.chunks_on(row, 2 * k);
    uint32_t words[4];
    load_matrices(words, at);
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] &= ~((words[w] >> 15 & 0x00010001u) * 0xffffu);
    store_matrices(at, words);
  }
}

// ---- kernel ----

template <class T, int kD, bool kPacked>
__global__ void __launch_bounds__(2 * kLongest, kD > 64 ? 1 : 2) short_backward_warpgroups(const ShortAttention a) {
  extern __shared__ __align__(1024) uint4 memory[];
  constexpr int kS = kLongest, kTile = kS * kD * 2;
  constexpr bool kAheadGrad = Held<kS, kD>::kGradientsAhead;
  using Rows = Panels<kD, kS>;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  const Rows k{base}, v{base + kTile};
  Turns turns{base + Held<kS, kD>::kBackwardBytes - Turns::kBytes};
  // Tensors that have two places change them every turn; `ahead`: where the next problem's stands.
  const auto q = [&](bool ahead = false) { return Rows{base + (turns.odd() != ahead ? 4 : 2) * kTile}; };
  const auto grad_out = [&](bool ahead = false) { return Rows{base + (kAheadGrad && turns.odd() != ahead ? 5 : 3) * kTile}; };
  const Panels<kS, kS> room{base + (5 + kAheadGrad) * kTile};  // p, and then grad_s
  const auto fetch_one = [&](const Rows& to, const ShortTensor& tensor, int problem) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS>(to, tensor, head_of(a, problem), extent.first_row, extent.rows, a.head_dim);
    }
    commit_copies();
  };
  const auto fetch_keys = [&](const Rows& to, const ShortTensor& tensor, int problem) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS>(to, tensor, keys_of(a, problem), extent.first_key, extent.keys, a.head_dim);
    }
    commit_copies();
  };
  const auto extent = [&] { return extent_of<kPacked>(a, turns.problem()); };
  // What the block's threads have stored or copied is there for the products of all.
  const auto show = [] {
    show_to_copies();
    __syncthreads();
  };
  wait_for_earlier();
  fetch_keys(k, a.k, blockIdx.x);
  fetch_keys(v, a.v, blockIdx.x);
  fetch_one(grad_out(), a.grad_out, blockIdx.x);
  fetch_one(q(), a.q, blockIdx.x);
  turns.begin(a);
  let_next_start();
  if constexpr (kPacked) clear_gradients_behind<T>(a);
  do {
    wait_for_all();
    show();
    const int asked = turns.ask(a);
    fetch_one(q(true), a.q, turns.next());
    if constexpr (kAheadGrad) fetch_one(grad_out(true), a.grad_out, turns.next());
    uint32_t grad_s[kS / 16][4];
    {
      float p[kS / 8][4];
      multiply_rows<T, kD>(p, q(), k);
      turns.answer(a, asked);
      const RowSums sums = exponentials<T, kS, false, true, kPacked>(p, a, turns.problem(), extent(), place_of_group());
      normalize<T, kS>(p, sums, grad_s);
      if (a.dropout.seed) {
        uint32_t kept[2];
        kept_by_dropout<kS, kPacked>(kept, a, turns.problem(), extent(), place_of_group());
        mark<kS>(grad_s, kept);
      }
      leave<kS>(grad_s, room, place_of_group());  // p
      __syncwarp();
      float grad_lse[2] = {0.f, 0.f};
      if (a.grad_lse) load_rows<kPacked>(grad_lse, a, turns.problem(), extent(), place_of_group());
      multiply_rows<T, kD>(p, grad_out(), v);  // the gradient of p
      if (a.dropout.seed) {
        through_softmax<T, kS, true>(p, grad_s, grad_lse, room, a.dropout.scale, place_of_group());
        take_off_marked(room, place_of_group());
      } else {
        through_softmax<T, kS, false>(p, grad_s, grad_lse, room, 1.f, place_of_group());
      }
    }
    float sums[kD / 8][4];
    const auto store_problem = [&](const ShortTensor& tensor, float factor, int start, int rows) {
      store_rows<T, kD>(sums, factor, factor, tensor, a, turns.problem(), start, rows, place_of_group());
    };
    if (a.grad_q.at) {
      multiply_held<T, kD>(sums, grad_s, k);
      store_problem(a.grad_q, a.scale, extent().first_row, extent().rows);
    }
    show();
    fetch_keys(k, a.k, turns.next());
    fetch_keys(v, a.v, turns.next());
    if (a.grad_v.at) {
      const float factor = a.dropout.seed ? a.dropout.scale : 1.f;
      multiply_columns<T, kD>(sums, room, grad_out());
      store_problem(a.grad_v, factor, extent().first_key, extent().keys);
    }
    __syncthreads();
    if constexpr (!kAheadGrad) fetch_one(grad_out(), a.grad_out, turns.next());
    leave<kS>(grad_s, room, place_of_group());
    show();
    if (a.grad_k.at) {
      multiply_columns<T, kD>(sums, room, q());
      store_problem(a.grad_k, a.scale, extent().first_key, extent().keys);
    }
    turns.advance();
  } while (turns.problem() < a.problems);
}

}  // namespace fuseline::short_attention
