// attention_short_forward.cuh for problems of up to 128 rows and keys on Hopper, by products of warpgroups, of 64 queries
// each.
#pragma once

#include "attention_short_wgmma.cuh"

namespace fuseline::short_attention {

// ---- kernel ----

template <class T, int kD, bool kPacked>
__global__ void __launch_bounds__(2 * kLongest, 2) short_forward_warpgroups(const ShortAttention a) {
  extern __shared__ __align__(1024) uint4 memory[];
  constexpr int kS = kLongest, kTile = kS * kD * 2;
  using Rows = Panels<kD, kS>;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  const Rows q{base}, k{base + kTile}, v{base + 2 * kTile};
  const auto fetch_scores = [&](int problem) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS>(q, a.q, head_of(a, problem), extent.first_row, extent.rows, a.head_dim);
      fetch<T, kS>(k, a.k, keys_of(a, problem), extent.first_key, extent.keys, a.head_dim);
    }
    commit_copies();
  };
  const auto fetch_values = [&](int problem) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS>(v, a.v, keys_of(a, problem), extent.first_key, extent.keys, a.head_dim);
    }
    commit_copies();
  };
  const auto extent = [&](const Turns& turns) { return extent_of<kPacked>(a, turns.problem()); };
  wait_for_earlier();
  fetch_scores(blockIdx.x);
  fetch_values(blockIdx.x);
  Turns turns{base + Held<kS, kD>::kForwardBytes - Turns::kBytes};
  turns.begin(a);
  let_next_start();
  if constexpr (kPacked) clear_out_behind<T>(a);
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
      sums = exponentials<T, kS, false, true, kPacked>(p, a, turns.problem(), extent(turns), place_of_group());
      pack_kept<T, kS, kPacked>(p, packed, a, turns.problem(), extent(turns), place_of_group());
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
    store_out<T, kD, kPacked>(out, sums, a, turns.problem(), extent(turns), place_of_group());
    turns.advance();
  } while (turns.problem() < a.problems);
}

}  // namespace fuseline::short_attention
