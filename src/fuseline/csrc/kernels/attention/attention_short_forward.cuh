// out = softmax(scale * q k^T + mask) v of short sequences, and the logarithms of the softmax's sums.
//
// Moves: q, k, v read once, out written once. Does: 4 T S D operations a problem on tensor cores, which at 128 x 128 x 64
// is half the time of the bytes. Limit: HBM bandwidth.
//
// Threads: a warp has 16 queries. Its scores and probabilities stay in registers, in which the product with the keys
// leaves them as the product with the values wants them. While a block multiplies by the values, the queries and keys of
// its next problem are on their way, and its next values while it stores; of the smallest problems (forward_ahead) all
// three for a whole turn.
#pragma once

#include "attention_short_launch.cuh"
#include "attention_short_products.cuh"
#include "attention_short_scores.cuh"

namespace fuseline::short_attention {

// Blocks that a multiprocessor has registers for.
template <int kS, int kD>
constexpr int kForwardBlocks = (kS == 128 || kD == 128 ? 16 : kD == 64 ? 20 : 24) / (kS / 16);

// ---- kernel ----

// kSkips: the products leave out blocks of 16 x 16 that are hidden as a whole.
template <class T, int kS, int kD, bool kSkips, bool kPacked>
__global__ void __launch_bounds__(2 * kS, kForwardBlocks<kS, kD>) short_forward(const ShortAttention a) {
  extern __shared__ __align__(1024) uint4 memory[];
  constexpr int kTile = kS * kD * 2;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  constexpr bool kAhead = Held<kS, kD>::kForwardAhead;
  Turns turns{base + Held<kS, kD>::kForwardBytes - Turns::kBytes};
  // Tensors that have two places change them every turn; `ahead`: where the next problem's stand.
  const auto tile = [&](int number, bool ahead) {
    return Tile<kD>{base + (kAhead && turns.odd() != ahead ? number + 3 : number) * kTile};
  };
  const auto q = [&](bool ahead = false) { return tile(0, ahead); };
  const auto k = [&](bool ahead = false) { return tile(1, ahead); };
  const auto v = [&](bool ahead = false) { return tile(2, ahead); };
  const auto fetch_scores = [&](int problem, bool ahead) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS, kAhead>(q(ahead), a.q, head_of(a, problem), extent.first_row, extent.rows, a.head_dim);
      fetch<T, kS, kAhead>(k(ahead), a.k, keys_of(a, problem), extent.first_key, extent.keys, a.head_dim);
    }
    commit_copies();
  };
  const auto fetch_values = [&](int problem, bool ahead) {
    if (problem < a.problems) {
      const Extent extent = extent_of<kPacked>(a, problem);
      fetch<T, kS, kAhead>(v(ahead), a.v, keys_of(a, problem), extent.first_key, extent.keys, a.head_dim);
    }
    commit_copies();
  };
  const auto extent = [&](const Turns& turns) { return extent_of<kPacked>(a, turns.problem()); };
  wait_for_earlier();
  fetch_scores(blockIdx.x, false);
  fetch_values(blockIdx.x, false);
  const Blocks<kS, kSkips> blocks{turns.at - Blocks<kS, kSkips>::kBytes};
  turns.begin(a);
  blocks.begin(a, Place::here<kS>());
  let_next_start();
  if constexpr (kPacked) clear_out_behind<T>(a);
  bool more;
  do {
    if constexpr (kAhead) {
      wait_for_all();
    } else {
      wait_for_oldest(2);
    }
    meet<kS>();
    const int asked = turns.ask(a);
    if constexpr (kAhead) {
      fetch_scores(turns.next(), true);
      fetch_values(turns.next(), true);
    }
    uint32_t packed[kS / 16][4];
    RowSums sums;
    {
      float p[kS / 8][4];
      multiply_rows<T, kD, kS, kSkips>(p, q(), k(), blocks.keys(Place::here<kS>()), Place::here<kS>());
      sums = exponentials<T, kS, kSkips, (kS < kLongest), kPacked>(p, a, turns.problem(), extent(turns), Place::here<kS>());
      pack_kept<T, kS, kPacked>(p, packed, a, turns.problem(), extent(turns), Place::here<kS>());
    }
    turns.answer(a, asked);
    if constexpr (!kAhead) {
      wait_for_all();
      meet<kS>();
      fetch_scores(turns.next(), false);
    }
    float out[kD / 8][4];
    multiply_held<T, kS, kD, kSkips>(out, packed, v(), blocks.keys(Place::here<kS>()), Place::here<kS>());
    if constexpr (!kAhead) {
      meet<kS>();
      fetch_values(turns.next(), false);
    }
    store_out<T, kD, kPacked>(out, sums, a, turns.problem(), extent(turns), Place::here<kS>());
    more = turns.next() < a.problems;
    turns.advance();
  } while (more);
}

// ---- launcher ----

template <class T, int kS>
int forward_of(const ShortAttention& a, const AttentionPlan& plan, void* stream) {
  const auto go = [&](void (*kernel)(ShortAttention)) { return launch_problems(kernel, a, plan.launches[0], stream); };
  return with_size<32, kWidest>(plan.form.width, [&](auto width) {
    if constexpr (kS == kPackedWarps) {
      if (a.starts_q != nullptr) return go(short_forward<T, kS, width(), false, true>);
    }
    if constexpr (kS == kLongest) {
      if (plan.form.skips) return go(short_forward<T, kS, width(), true, false>);
    }
    return go(short_forward<T, kS, width(), false, false>);
  });
}

}  // namespace fuseline::short_attention
