// Attention forward, memory linear in the sequence: Dao, "FlashAttention-2", 2023, with the online softmax of Milakov and
// Gimelshein, 2018.
//
// Moves q, k, v and out once (keys and values again from L2 for every tile of query rows); does 4 * T * S * D operations a
// head. Limit: tensor cores, fed from shared memory; FMA units for fp32.
//
// A block has 64 or 128 query rows of a head, a warp 16 or 32 of them, and goes through the tiles of keys that any of its
// rows sees: while one is worked on, the next is copied. Scores never leave registers: the product's sums are the other
// product's operands. Bounds are applied in tiles that they cut; a plain call (kPlain) does nothing else to scores.
#pragma once

#include "attention_dropout.cuh"
#include "attention_launch.cuh"
#include "attention_mask.cuh"

namespace fuseline {

constexpr int kAttentionThreads = 128;

// Powers of two are taken relative to a reference that follows a row's highest score. It moves only when the score has
// outgrown it by this much, so that sums are seldom rescaled: powers up to 2^8 lose nothing.
constexpr float kSlack = 8.f;

template <class T, int kD, bool kPlain>
struct ForwardTiles {
  static constexpr AttentionTiles kSizes = forward_tiles(sizeof(T), kD, kPlain);
  static constexpr int kM = kSizes.m, kRows = kSizes.held(), kKeys = kSizes.step, kShared = kSizes.shared;
  static constexpr int kTile = kKeys * kPitch<T, kD>;
  using Order = KeyColumns<kKeys / 8>;
};

// Divides the warp's sums by their rows' totals, sinks among them, and writes them and lse.
template <class T, int kD, int kM>
__device__ __forceinline__ void store_sums(const Attention& a, int tiles, const float (&sums)[kM][kD / 8][4],
                                           const float (&reference)[kM][2], const float (&total)[kM][2], T* tile) {
  const fuseline_attention& c = a.call;
  const Task task(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
  const Sequence sequence(c, task.sequence);
  const int lane = threadIdx.x % 32, first = task.tile * 64 * kM + threadIdx.x / 32 * 16 * kM;
  float factor[kM][2];
  const float sink = c.sinks != nullptr ? c.sinks[task.head] * kLog2E : -kInfinity;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = total[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float seen = reference[m][half];
      const float most = fmaxf(seen, sink), zero = most == -kInfinity ? 0.f : most;
      const float shrink = power_of_two(seen - zero);
      sum = fmaf(sum, shrink, power_of_two(sink - zero));
      factor[m][half] = sum > 0.f ? shrink / sum * (a.dropout.seed != nullptr ? a.dropout.scale : 1.f) : 0.f;
      const int row = first + 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < sequence.rows) {
        c.lse[sequence.statistic(c, task.head, row)] = sum > 0.f ? (zero + log2f(sum)) * kLn2 : -kInfinity;
      }
    }
  store_rows<T, kD, kM>(sums, factor, tile,
                        static_cast<T*>(c.out) + sequence.row_offset(c.out_strides, task.head, first),
                        c.out_strides[2], sequence.rows - first, int(c.head_dim));
}

// The rows behind the last packed sequence see nothing.
template <class T, int kThreads, int kRows>
__device__ __forceinline__ void store_nothing_seen(const fuseline_attention& c, const Task& task, int tiles) {
  T* const out = static_cast<T*>(c.out);
  for (int64_t row = c.cu_seqlens_q[task.sequence] + int64_t(task.tile) * kRows; row < c.seqlen_q;
       row += int64_t(tiles) * kRows) {
    const int rows = int(min(int64_t(kRows), c.seqlen_q - row));
    store_zeros<T, kThreads>(out + task.head * c.out_strides[1] + row * c.out_strides[2], c.out_strides[2], rows,
                             int(c.head_dim));
    if (int(threadIdx.x) < rows) {
      c.lse[task.head * c.seqlen_q + row + threadIdx.x] = c.sinks != nullptr ? c.sinks[task.head] : -kInfinity;
    }
  }
}

// A warp's scores become powers of two relative to `reference`, and join the totals; sums follow a reference that moves.
template <int kD, int kM, int kN>
__device__ __forceinline__ void take_powers(float (&scores)[kM][kN][4], float unit, float (&reference)[kM][2],
                                            float (&total)[kM][2], float (&sums)[kM][kD / 8][4]) {
  float most[kM][2];
  bool outgrown = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& high = most[m][half];
      high = scores[m][0][2 * half];
#pragma unroll
      for (int n = 0; n < kN; ++n) high = fmaxf(high, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2)) * unit;
      outgrown = outgrown || high > reference[m][half] + kSlack;
    }
  if (__any_sync(0xffffffffu, outgrown)) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(reference[m][half], most[m][half]);
        const float shrink = power_of_two(reference[m][half] - (next == -kInfinity ? 0.f : next));
        reference[m][half] = next;
        total[m][half] *= shrink;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) sums[m][n][2 * half] *= shrink, sums[m][n][2 * half + 1] *= shrink;
      }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float zero = reference[m][half] == -kInfinity ? 0.f : reference[m][half];  // powers are then 0
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[m][n][2 * half + e];
          score = power_of_two(fmaf(score, unit, -zero));
          total[m][half] += score;
        }
    }
}

// Zeros in both tiles of the mask where rows behind the sequence's last stand, which no copy writes: the rows of a warp move
// their references together, and what was left there must not tell them when.
template <int kRows, int kThreads>
__device__ __forceinline__ void clear_mask_rows(unsigned char* tiles, const MaskTile& tile, int rows) {
  if (tile.pitch == 0) return;
  for (int at = rows * tile.pitch + int(threadIdx.x) * 16; at < kRows * tile.pitch; at += kThreads * 16) {
    *reinterpret_cast<uint4*>(tiles + at) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(tiles + tile.bytes + at) = make_uint4(0, 0, 0, 0);
  }
}

template <class T, int kD, bool kPlain>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_forward(const __grid_constant__ Attention a, int tiles) {
  using Of = ForwardTiles<T, kD, kPlain>;
  constexpr int kM = Of::kM, kN = Of::kKeys / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const kv_tiles = q_tile + Of::kRows * kPitch<T, kD>;  // two stages of keys and values

  const fuseline_attention& c = a.call;
  const Task task(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
  const int warp = threadIdx.x / 32, head_dim = int(c.head_dim);
  if (c.cu_seqlens_q != nullptr && task.sequence == c.sequences) {
    store_nothing_seen<T, kAttentionThreads, Of::kRows>(c, task, tiles);
    return;
  }
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kRows, last = min(first + Of::kRows, sequence.rows) - 1;
  if (first > last) return;

  const int kv_head = task.head / a.group;
  unsigned char* const mask_tiles = shared + Of::kShared;
  // Kept in shared memory, because registers are short.
  __shared__ const T* volatile keys_and_values[2];
  if (threadIdx.x == 0) {
    keys_and_values[0] = static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, kv_head, 0);
    keys_and_values[1] = static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, kv_head, 0);
  }
  __syncthreads();
  const auto copy_keys = [&](int key) {
    T* const tile = kv_tiles + key / Of::kKeys % 2 * 2 * Of::kTile;
    copy_tile<T, Of::kKeys, kD, kAttentionThreads, typename Of::Order>(
        tile, keys_and_values[0] + key * c.k_strides[2], c.k_strides[2],
                                                   sequence.keys - key, head_dim);
    copy_tile<T, Of::kKeys, kD, kAttentionThreads, typename Of::Order>(
        tile + Of::kTile, keys_and_values[1] + key * c.v_strides[2],
                                                   c.v_strides[2], sequence.keys - key, head_dim);
    if constexpr (!kPlain) {
      copy_mask<T, Of::kRows, Of::kKeys, kAttentionThreads>(mask_tiles + key / Of::kKeys % 2 * a.mask_tile.bytes, a, sequence,
                                                            task.head, first, key);
    }
    end_copies();
  };

  const int keys_from = sequence.keys_from(a, first) / Of::kKeys * Of::kKeys, keys_to = sequence.keys_to(a, last);
  // All rows see the keys in between.
  const int whole_from = sequence.keys_from(a, first + Of::kRows - 1), whole_to = sequence.keys_to(a, first);
  copy_tile<T, Of::kRows, kD, kAttentionThreads>(
      q_tile, static_cast<const T*>(c.q) + sequence.row_offset(c.q_strides, task.head, first), c.q_strides[2],
      sequence.rows - first, head_dim);
  if constexpr (!kPlain) clear_mask_rows<Of::kRows, kAttentionThreads>(mask_tiles, a.mask_tile, sequence.rows - first);
  if (keys_from < keys_to) copy_keys(keys_from);

  // Scores are kept in units in which `unit` times them is a power of two: dot products if that is all there is to them.
  const float unit = kPlain || keeps_dots(a) ? a.scale_log2 : 1.f;
  float sums[kM][kD / 8][4], reference[kM][2], total[kM][2];
  set_zero(sums);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[m][half] = -kInfinity, total[m][half] = 0.f;

  T* const q_warp = q_tile + warp * 16 * kM * kPitch<T, kD>;
  for (int key = keys_from; key < keys_to; key += Of::kKeys) {
    wait_copies<0>();
    __syncthreads();
    if (key + Of::kKeys < keys_to) copy_keys(key + Of::kKeys);
    const T* const k_tile = kv_tiles + key / Of::kKeys % 2 * 2 * Of::kTile;

    float scores[kM][kN][4];
    const unsigned char* const mask_tile = mask_tiles + key / Of::kKeys % 2 * a.mask_tile.bytes;
    const Place place{sequence, task.head, first + warp * 16 * kM, key, mask_at(a, mask_tile, warp * 16 * kM, 0)};
    multiply_rows<T, kD>(scores, q_warp, k_tile);
    if constexpr (!kPlain) finish_scores<T, false, false>(a, place, scores, scores);
    if (key < whole_from || key + Of::kKeys > whole_to) {
      const Task again(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
      const Sequence same(c, again.sequence);
      hide_bounds<false>(a, Place{same, again.head, again.tile * Of::kRows + warp * 16 * kM, key, nullptr}, scores);
    }

    take_powers<kD>(scores, unit, reference, total, sums);
    if (!kPlain && a.dropout.seed != nullptr) {
      KeptElements<false, kM, kN> kept;
      kept.draw(a, place);
      each_element<kM, kN>([&](int m, int n, int e) { scores[m][n][e] = kept(m, n, e) ? scores[m][n][e] : 0.f; });
    }
    multiply_columns<T, kD>(sums, scores, k_tile + Of::kTile);
  }
  if (keys_from >= keys_to) {
    end_copies();
    wait_copies<0>();
    __syncthreads();
  }
  store_sums<T, kD, kM>(a, tiles, sums, reference, total, q_warp);
}

template <class T, int kD, bool kPlain>
int launch_forward_tiles(const Attention& a, const AttentionLaunch& by, void* stream) {
  return launch_attention(attention_forward<T, kD, kPlain>, a, by, stream);
}

template <class T>
int launch_forward(const Attention& a, const AttentionLaunch& by, void* stream) {
  return with_tiles<T>(by, [&](auto width, auto plain) { return launch_forward_tiles<T, width(), plain()>(a, by, stream); });
}

}  // namespace fuseline
