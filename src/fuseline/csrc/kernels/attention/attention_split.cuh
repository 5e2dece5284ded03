// Attention of 1 .. 16 query rows over a long cache of keys: the cache is cut into parts, each part gives sums and their
// reference for every row, and a second kernel adds these up in one order (Dao and others, "Flash-Decoding", 2023). Where a
// part is all of the cache, the first writes the result.
//
// Moves k and v once; does 4 * T * S * D operations a head. Limit: HBM bandwidth, so what counts is bytes under way: two
// to three tiles of keys and values ahead of the one worked on.
//
// The rows of all query heads that share a key head are rows of one product: 16, of one warp, or 64, of four. With 16
// the four warps of a block take every fourth tile of keys each, have copies of their own under way, and meet when these
// are done, to add up what they have; with 64 they share tiles. The second kernel comes while the first ends.
#pragma once

#include "attention_combine.cuh"
#include "device/attention_scores.cuh"
#include "device/attention_tiles.cuh"

namespace fuseline {

template <class T, int kD, int kRowWarps>
struct SplitTiles {
  static constexpr int kWarps = 4, kGroups = kWarps / kRowWarps;
  static constexpr AttentionTiles kSizes = split_tiles(sizeof(T), kD, kRowWarps);
  static constexpr int kKeys = kSizes.step, kRound = kKeys * kGroups, kStages = kSizes.stages, kShared = kSizes.shared;
  static constexpr bool kHoldsQ = split_holds_queries(kD, kRowWarps);  // in registers; else it has a tile of its own
  static constexpr int kTile = kKeys * kPitch<T, kD>, kQTile = 16 * kRowWarps * kPitch<T, kD>;
  static constexpr int kLine = kD + 4;  // floats of a row of sums in shared memory
  static_assert(!kHoldsQ || kQTile <= 2 * kTile);
  static_assert(kGroups == 1 || (kGroups * 16 * (kLine + 2)) * 4 <= kGroups * kStages * 2 * kTile * int(sizeof(T)));
};

template <class T, int kD, int kRowWarps>
__global__ void __launch_bounds__(128, kD <= 128 ? 2 : 1) attention_split(const __grid_constant__ Split g, int) {
  using Of = SplitTiles<T, kD, kRowWarps>;
  constexpr int kN = Of::kKeys / 8, kWide = 16 / int(sizeof(T));
  extern __shared__ __align__(16) unsigned char shared[];
  const Attention& a = g.a;
  const fuseline_attention& c = a.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_dim = int(c.head_dim);
  T* const tiles = reinterpret_cast<T*>(shared) + warp / kRowWarps * Of::kStages * 2 * Of::kTile;
  unsigned block = blockIdx.x;
  const auto next = [&](int count) {
    const int index = int(block % unsigned(count));
    block /= unsigned(count);
    return index;
  };
  const int chunk = next(g.chunks), split = next(g.splits), kv_head = next(int(c.kv_heads));
  const Sequence sequence(c, int(block));
  const auto meet = [] {
    if constexpr (kRowWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };

  // This block's share of the keys that any row sees, in whole rounds.
  const int seen_from = sequence.keys_from(a, 0) / Of::kRound, seen_to = sequence.keys_to(a, sequence.rows - 1);
  const int rounds = max(0, (seen_to + Of::kRound - 1) / Of::kRound - seen_from);
  const int round_from = seen_from + int(int64_t(rounds) * split / g.splits);
  const int round_to = seen_from + int(int64_t(rounds) * (split + 1) / g.splits);
  wait_for_earlier();
  const T* const k = static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, kv_head, 0);
  const T* const v = static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, kv_head, 0);
  const auto first_key = [&](int round) { return round * Of::kRound + warp / kRowWarps * Of::kKeys; };
  const auto copy_round = [&](int round) {
    if (round < round_to) {
      const int key = first_key(round);
      T* const tile = tiles + (round - round_from) % Of::kStages * 2 * Of::kTile;
      const int keys = seen_to - key;
      copy_tile<T, Of::kKeys, kD, 32 * kRowWarps>(tile, k + key * c.k_strides[2], c.k_strides[2], keys, head_dim);
      copy_tile<T, Of::kKeys, kD, 32 * kRowWarps>(tile + Of::kTile, v + key * c.v_strides[2], c.v_strides[2], keys,
                                                  head_dim);
    }
    end_copies();
  };
#pragma unroll
  for (int stage = 0; stage + 1 < Of::kStages; ++stage) copy_round(round_from + stage);

  // Row r of a key head is row r % T of its query head r / T. Queries come through the stage that no copy fills yet, or
  // stay behind the stages.
  const int first_row = (chunk * kRowWarps + warp % kRowWarps) * 16, all_rows = a.group * sequence.rows;
  T* const q_tile = tiles + (Of::kStages - (Of::kHoldsQ ? 1 : 0)) * 2 * Of::kTile + warp % kRowWarps * 16 * kPitch<T, kD>;
  for (int at = lane; at < 16 * (kD / kWide); at += 32) {
    const int row = at / (kD / kWide), column = at % (kD / kWide) * kWide, r = first_row + row;
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (r < all_rows && column < head_dim) {
      const int head = kv_head * a.group + r / sequence.rows;
      vector = *reinterpret_cast<const uint4*>(static_cast<const T*>(c.q) +
                                               sequence.row_offset(c.q_strides, head, r % sequence.rows) + column);
    }
    *reinterpret_cast<uint4*>(q_tile + row * kPitch<T, kD> + column) = vector;
  }
  __syncwarp();
  uint32_t q[Of::kHoldsQ ? kD / 16 : 1][4];
  if constexpr (Of::kHoldsQ) {
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) load_a<T, kD>(q[i], q_tile, 0, 16 * i);
  }

  int from[2], to[2];
  int64_t mask_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = first_row + lane / 4 + 8 * half;
    const bool there = r < all_rows;
    const int head = kv_head * a.group + (there ? r / sequence.rows : 0), row = there ? r % sequence.rows : 0;
    from[half] = sequence.keys_from(a, row), to[half] = there ? sequence.keys_to(a, row) : 0;
    mask_row[half] = sequence.mask(c, head, row, 0);
  }
  const float scale = a.cap > 0.f ? a.scale / a.cap : a.scale_log2, cap = a.cap * kLog2E;

  float sums[1][kD / 8][4], reference[2] = {-kInfinity, -kInfinity}, total[2] = {0.f, 0.f};
  set_zero(sums);
  for (int round = round_from; round < round_to; ++round) {
    wait_copies<Of::kStages - 2>();
    meet();
    copy_round(round + Of::kStages - 1);
    const T* const k_tile = tiles + (round - round_from) % Of::kStages * 2 * Of::kTile;
    const int key = first_key(round) + 2 * (lane % 4);

    float scores[1][kN][4];
    if constexpr (Of::kHoldsQ) {
      set_zero(scores);
#pragma unroll
      for (int i = 0; i < kD / 16; ++i)
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
          uint32_t right[4];
          load_b_rows<T, kD>(right, k_tile, 8 * n, 16 * i);
          mma_16816<T>(scores[0][n], q[i], right[0], right[1]);
          mma_16816<T>(scores[0][n + 1], q[i], right[2], right[3]);
        }
    } else {
      multiply_rows<T, kD>(scores, q_tile, k_tile);
    }
    const auto each = [&](auto&& change) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) change(scores[0][n][e], e / 2, key + 8 * n + e % 2);
    };
    each([&](float& x, int, int) { x *= scale; });
    if (a.cap > 0.f) each([&](float& x, int, int) { x = hyperbolic_tangent<T>(x) * cap; });
    if (c.mask_kind == FUSELINE_MASK_BOOL) {
      const uint8_t* mask = static_cast<const uint8_t*>(c.mask);
      each([&](float& x, int half, int at) {
        if (at < to[half] && __ldg(mask + mask_row[half] + at * c.mask_strides[3]) == 0) x = -kInfinity;
      });
    } else if (c.mask_kind == FUSELINE_MASK_ADD_FP32) {
      const float* mask = static_cast<const float*>(c.mask);
      each([&](float& x, int half, int at) {
        if (at < to[half]) x = fmaf(__ldg(mask + mask_row[half] + at * c.mask_strides[3]), kLog2E, x);
      });
    } else if (c.mask_kind == FUSELINE_MASK_ADD) {
      const T* mask = static_cast<const T*>(c.mask);
      each([&](float& x, int half, int at) {
        if (at < to[half]) x = fmaf(to_float(mask[mask_row[half] + at * c.mask_strides[3]]), kLog2E, x);
      });
    }
    each([&](float& x, int half, int at) {
      if (at < from[half] || at >= to[half]) x = -kInfinity;
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = reference[half];
#pragma unroll
      for (int n = 0; n < kN; ++n) most = fmaxf(most, fmaxf(scores[0][n][2 * half], scores[0][n][2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float zero = most == -kInfinity ? 0.f : most, shrink = power_of_two(reference[half] - zero);
      reference[half] = most;
      total[half] *= shrink;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[0][n][2 * half + e];
          score = power_of_two(score - zero);
          total[half] += score;
        }
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) sums[0][n][2 * half] *= shrink, sums[0][n][2 * half + 1] *= shrink;
    }
    multiply_columns<T, kD>(sums, scores, k_tile + Of::kTile);
  }

  let_next_start();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
  }
  if constexpr (Of::kGroups == 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first_row + lane / 4 + 8 * half;
      if (r >= all_rows) continue;
      const int head = kv_head * a.group + r / sequence.rows;
      const int64_t at = split * g.rows + sequence.statistic(c, head, r % sequence.rows);
      if (g.splits == 1) {
        const RowResult result(c, head, reference[half], total[half]);
        if (lane % 4 == 0) c.lse[at] = result.lse;
        T* const out = static_cast<T*>(c.out) + sequence.row_offset(c.out_strides, head, r % sequence.rows);
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          const int column = 8 * n + 2 * (lane % 4);
          if (column < head_dim) {
            *reinterpret_cast<uint32_t*>(out + column) =
                pack_pair<T>(sums[0][n][2 * half] * result.factor, sums[0][n][2 * half + 1] * result.factor);
          }
        }
        continue;
      }
      if (lane % 4 == 0) g.totals[at] = make_float2(reference[half], total[half]);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        const int column = 8 * n + 2 * (lane % 4);
        if (column < head_dim) {
          *reinterpret_cast<float2*>(g.sums + at * head_dim + column) =
              make_float2(sums[0][n][2 * half], sums[0][n][2 * half + 1]);
        }
      }
    }
  } else {  // the warps' sums, relative to the highest of their references, through shared memory
    float2* const all_totals = reinterpret_cast<float2*>(shared);  // [warps][16]
    float* const lines = reinterpret_cast<float*>(all_totals + Of::kGroups * 16);
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 == 0) all_totals[warp * 16 + lane / 4 + 8 * half] = make_float2(reference[half], total[half]);
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      float most = -kInfinity;
#pragma unroll
      for (int other = 0; other < Of::kGroups; ++other) most = fmaxf(most, all_totals[other * 16 + row].x);
      const float shrink = power_of_two(reference[half] - (most == -kInfinity ? 0.f : most));
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        *reinterpret_cast<float2*>(lines + (warp * 16 + row) * Of::kLine + 8 * n + 2 * (lane % 4)) =
            make_float2(sums[0][n][2 * half] * shrink, sums[0][n][2 * half + 1] * shrink);
      }
    }
    __syncthreads();
    constexpr int kVectors = kD / 4;
    for (int i = threadIdx.x; i < 16 * kVectors; i += 128) {
      const int row = i / kVectors, column = i % kVectors * 4, r = chunk * 16 + row;
      if (r >= all_rows || column >= head_dim) continue;
      const int head = kv_head * a.group + r / sequence.rows;
      const int64_t at = split * g.rows + sequence.statistic(c, head, r % sequence.rows);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int other = 0; other < Of::kGroups; ++other) {
        const float4 one = *reinterpret_cast<const float4*>(lines + (other * 16 + row) * Of::kLine + column);
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
      if (g.splits > 1) *reinterpret_cast<float4*>(g.sums + at * head_dim + column) = sum;
      if (g.splits > 1 && column > 0) continue;
      float most = -kInfinity, all = 0.f;
#pragma unroll
      for (int other = 0; other < Of::kGroups; ++other) most = fmaxf(most, all_totals[other * 16 + row].x);
#pragma unroll
      for (int other = 0; other < Of::kGroups; ++other) {
        const float2 one = all_totals[other * 16 + row];
        all = fmaf(one.y, power_of_two(one.x - (most == -kInfinity ? 0.f : most)), all);
      }
      if (g.splits > 1) {
        g.totals[at] = make_float2(most, all);
        continue;
      }
      const RowResult result(c, head, most, all);
      if (column == 0) c.lse[at] = result.lse;
      T* const out = static_cast<T*>(c.out) + sequence.row_offset(c.out_strides, head, r % sequence.rows) + column;
      *reinterpret_cast<uint2*>(out) = make_uint2(pack_pair<T>(sum.x * result.factor, sum.y * result.factor),
                                                  pack_pair<T>(sum.z * result.factor, sum.w * result.factor));
    }
  }
}

template <class T>
int launch_split_parts(const Split& g, const AttentionPlan& plan, void* stream) {
  const AttentionLaunch& by = plan.launches[0];
  const int code = with_size<64, kWidestHead>(by.width, [&](auto width) {
    constexpr int kD = decltype(width)::value;
    return launch_attention(plan.row_warps == 1 ? attention_split<T, kD, 1> : attention_split<T, kD, 4>, g, by, stream, true);
  });
  if (code != 0 || plan.count == 1) return code;
  return launch_attention(plan.splits > kFewKeySplits ? attention_combine<T> : attention_combine_few<T>, g, plan.launches[1],
                          stream, true);
}

}  // namespace fuseline
