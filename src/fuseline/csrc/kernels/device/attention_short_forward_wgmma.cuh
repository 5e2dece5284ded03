// attention_short_forward.cuh for problems of up to 128 rows and keys on Hopper, by products of warpgroups, of 64 queries
// each.
#pragma once

#include "attention_short_wgmma.cuh"

namespace fuseline::short_attention {

// ---- kernel ----

template <class T, int kD>
__global__ void __launch_bounds__(2 * kLongest, 2) short_forward_warpgroups(const ShortAttention a) {
  extern __shared__ __align__(1024) uint4 memory[];
  constexpr int kS = kLongest, kTile = kS * kD * 2;
  using Rows = Panels<kD, kS>;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  const Rows q{base}, k{base + kTile}, v{base + 2 * kTile};
  const auto fetch_scores = [&](int problem) {
    if (problem < a.problems) {
      fetch<T, kS>(q, a.q, head_of(a, problem), a.seqlen_q, a.head_dim);
      fetch<T, kS>(k, a.k, keys_of(a, problem), a.seqlen_k, a.head_dim);
    }
    commit_copies();
  };
  const auto fetch_values = [&](int problem) {
    if (problem < a.problems) fetch<T, kS>(v, a.v, keys_of(a, problem), a.seqlen_k, a.head_dim);
    commit_copies();
  };
  wait_for_earlier();
  fetch_scores(blockIdx.x);
  fetch_values(blockIdx.x);
  Turns turns{base + kForwardBytes<kS, kD> - Turns::kBytes};
  turns.begin(a);
  let_next_start();
  do {
    wait_for_oldest(2);
    show_to_copies();
    __syncthreads();
    const int asked = turns.ask(a);
    uint32_t packed[kS / 16][4];
    RowSums sums;
    {
      float p[kS / 8][4];
      multiply_rows<T, kD>(p, q, k);
      sums = exponentials<T, kS, false, true>(p, a, turns.problem(), place_of_group());
      pack_kept<T, kS>(p, packed, a, turns.problem(), place_of_group());
    }
    turns.answer(a, asked);
    wait_for_all();
    show_to_copies();
    __syncthreads();
    fetch_scores(turns.next());
    float out[kD / 8][4];
    multiply_held<T, kD>(out, packed, v);
    __syncthreads();
    fetch_values(turns.next());
    const Place place = place_of_group();
    store_out<T, kD>(out, sums, a, turns.problem(), place);
    turns.advance();
  } while (turns.problem() < a.problems);
}

// ---- launcher ----

template <class T>
int forward_by_warpgroups(const ShortAttention& a, const Device& device, void* stream) {
  return with_head_dim(a.head_dim, [&](auto head_dim) {
    constexpr int kD = decltype(head_dim)::value;
    return launch_warpgroups(short_forward_warpgroups<T, kD>, a, kForwardBytes<kLongest, kD>, device, stream);
  });
}

}  // namespace fuseline::short_attention
