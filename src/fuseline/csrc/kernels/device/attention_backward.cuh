// Attention backward: probabilities are computed again from lse; with dp[t, s] = dot(grad_out[t], v[s]) * dropout[t, s],
//   delta[t] = dot(out[t], grad_out[t]) - grad_lse[t],   dy[t, s] = p[t, s] * (dp[t, s] - delta[t])  (the mask's gradient)
//   grad_v[s] = sum_t p[t, s] * dropout[t, s] * grad_out[t],  grad_q[t] = scale * sum_s dx[t, s] * k[s],
//   grad_k[s] = scale * sum_t dx[t, s] * q[t],  dx = dy * (1 - tanh^2) where scores are capped, else dy.
//
// One kernel goes through the query rows of a tile of keys, one through the keys of a tile of rows: scores are computed
// twice, no two blocks add to the same place, and every sum has one order. 14 * T * S * D operations a head in place of
// 10. Limit: tensor cores and the shared memory that feeds them; FMA units for fp32.
//
// In the kernel of keys the product's rows are keys (kTurned): its probabilities are then the left operands of the sums
// over query rows as they lie.
#pragma once

#include "attention_dropout.cuh"
#include "attention_launch.cuh"
#include "attention_mask.cuh"
#include "ring.cuh"

namespace fuseline {

// Tiles of the two kernels: kM times 16 rows of each of kWarps warps hold still, kStep rows pass by. As many as registers
// hold with the scores and their gradients, and with what a general call does to these.
template <class T, int kD, bool kPlain>
struct BackwardTiles {
  static constexpr bool kExact = std::is_same_v<T, float>;
  static constexpr AttentionTiles kSizes = backward_tiles(sizeof(T), kD, kPlain);
  static constexpr int kM = kSizes.m, kWarps = kSizes.warps, kThreads = kSizes.threads(), kShared = kSizes.shared;
  static constexpr int kHeld = kSizes.held(), kStep = kSizes.step;
  static constexpr int kRowsAtOnce = kPlain ? kStep : std::min(kStep, kExact && kD == 128 ? 8 : 16);  // of a step
  static constexpr int kHeldTile = kHeld * kPitch<T, kD>, kStepTile = kStep * kPitch<T, kD>;
};

// The warp's products become p, without what dropout drops, and dots of grad_out and v become dx (dy if not kSlopes).
// lse(m, n, e) and delta(m, n, e) are lse_log2 and delta of an element's row; `whole`: bounds hide nothing.
template <class T, bool kPlain, bool kTurned, bool kSlopes, int kM, int kN, class Lse, class Delta>
__device__ __forceinline__ void differentiate(const Attention& a, const Place& place, bool whole,
                                              float (&scores)[kM][kN][4], float (&dots)[kM][kN][4], Lse&& lse,
                                              Delta&& delta) {
  KeptElements<kTurned, kM, kN> kept;
  const bool drops = !kPlain && a.dropout.seed != nullptr;
  if (drops) {
    kept.draw(a, place);
    each_element<kM, kN>([&](int m, int n, int e) {
      dots[m][n][e] = kept(m, n, e) ? fmaf(dots[m][n][e], a.dropout.scale, -delta(m, n, e)) : -delta(m, n, e);
    });
  } else {
    each_element<kM, kN>([&](int m, int n, int e) { dots[m][n][e] -= delta(m, n, e); });
  }
  if constexpr (!kPlain) finish_scores<T, kTurned, kSlopes>(a, place, scores, dots);
  if (!whole) hide_bounds<kTurned>(a, place, scores);
  const float unit = kPlain || keeps_dots(a) ? a.scale_log2 : 1.f;
  each_element<kM, kN>([&](int m, int n, int e) {
    const float p = power_of_two(fmaf(scores[m][n][e], unit, -lse(m, n, e)));
    dots[m][n][e] *= p;
    scores[m][n][e] = drops && !kept(m, n, e) ? 0.f : p;
  });
}

// Zeros in the rows of a gradient behind the last packed sequence.
template <class T, int kThreads>
__device__ __forceinline__ void store_zeros_behind(T* to, const int64_t (&strides)[3], int head, int64_t from, int64_t to_row,
                                                   int tile, int tiles, int rows_a_tile, int head_dim) {
  for (int64_t row = from + int64_t(tile) * rows_a_tile; row < to_row; row += int64_t(tiles) * rows_a_tile) {
    store_zeros<T, kThreads>(to + head * strides[1] + row * strides[2], strides[2],
                             int(min(int64_t(rows_a_tile), to_row - row)), head_dim);
  }
}

template <class T, int kD, bool kPlain, bool kWantKeys, bool kWantValues>
__global__ void __launch_bounds__(BackwardTiles<T, kD, kPlain>::kThreads, 2)
    attention_backward_keys(const __grid_constant__ AttentionBackward g, int tiles) {
  using Of = BackwardTiles<T, kD, kPlain>;
  constexpr int kM = Of::kM, kN = Of::kRowsAtOnce / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const k_tile = reinterpret_cast<T*>(shared);
  T* const v_tile = k_tile + Of::kHeldTile;
  T* const steps = v_tile + Of::kHeldTile;                                        // two stages of q and grad_out
  float* const statistics = reinterpret_cast<float*>(steps + 4 * Of::kStepTile);  // two of lse and delta

  const Attention& a = g.a;
  const fuseline_attention& c = a.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_dim = int(c.head_dim);
  const Task task(tiles, int(c.kv_heads), false);
  T* const grad_k = static_cast<T*>(g.grad_k);
  T* const grad_v = static_cast<T*>(g.grad_v);
  if (c.cu_seqlens_k != nullptr && task.sequence == c.sequences) {
    const int64_t from = c.cu_seqlens_k[task.sequence];
    if (kWantKeys && grad_k != nullptr) {
      store_zeros_behind<T, Of::kThreads>(grad_k, g.grad_k_strides, task.head, from, c.seqlen_k, task.tile, tiles,
                                          Of::kHeld, head_dim);
    }
    if (kWantValues && grad_v != nullptr) {
      store_zeros_behind<T, Of::kThreads>(grad_v, g.grad_v_strides, task.head, from, c.seqlen_k, task.tile, tiles,
                                          Of::kHeld, head_dim);
    }
    return;
  }
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kHeld, last = min(first + Of::kHeld, sequence.keys) - 1;
  if (first > last) return;

  copy_tile<T, Of::kHeld, kD, Of::kThreads, KeyRows<kM>>(
      k_tile, static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, task.head, first), c.k_strides[2],
      sequence.keys - first, head_dim);
  if (kWantKeys) {
    copy_tile<T, Of::kHeld, kD, Of::kThreads, KeyRows<kM>>(
        v_tile, static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, task.head, first), c.v_strides[2],
        sequence.keys - first, head_dim);
  }
  const int rows_from = sequence.rows_from(a, first) / Of::kStep * Of::kStep, rows_to = sequence.rows_to(a, last);
  const int first_head = task.head * a.group, last_head = first_head + a.group - 1;
  unsigned char* const mask_tiles = shared + Of::kShared;
  const auto copy_step = [&](int head, int row, int stage) {
    T* const tile = steps + stage * 2 * Of::kStepTile;
    copy_tile<T, Of::kStep, kD, Of::kThreads>(
        tile, static_cast<const T*>(c.q) + sequence.row_offset(c.q_strides, head, row), c.q_strides[2],
        sequence.rows - row, head_dim);
    copy_tile<T, Of::kStep, kD, Of::kThreads>(
        tile + Of::kStepTile, static_cast<const T*>(g.grad_out) + sequence.row_offset(g.grad_out_strides, head, row),
        g.grad_out_strides[2], sequence.rows - row, head_dim);
    if (int(threadIdx.x) < Of::kStep) {
      const bool there = row + int(threadIdx.x) < sequence.rows;
      const int64_t at = there ? sequence.statistic(g, head, row) + threadIdx.x : 0;
      float* const to = statistics + stage * 2 * Of::kStep + threadIdx.x;
      copy_async<4>(to, g.lse_log2 + at, there);
      copy_async<4>(to + Of::kStep, g.delta + at, there);
    }
    if constexpr (!kPlain) {
      copy_mask<T, Of::kStep, Of::kHeld, Of::kThreads>(mask_tiles + stage * a.mask_tile.bytes, a, sequence, head, row, first);
    }
    end_copies();
  };

  float k_sums[kM][kWantKeys ? kD / 8 : 1][4], v_sums[kM][kWantValues ? kD / 8 : 1][4];
  set_zero(k_sums);
  set_zero(v_sums);
  const T* const k_warp = k_tile + warp * 16 * kM * kPitch<T, kD>;
  const T* const v_warp = v_tile + warp * 16 * kM * kPitch<T, kD>;
  int stage = 0;
  if (rows_from < rows_to) copy_step(first_head, rows_from, 0);
  for (int head = first_head; head <= last_head; ++head) {
    for (int row = rows_from; row < rows_to; row += Of::kStep) {
      wait_copies<0>();
      __syncthreads();
      if (row + Of::kStep < rows_to) {
        copy_step(head, row + Of::kStep, stage ^ 1);
      } else if (head < last_head) {
        copy_step(head + 1, rows_from, stage ^ 1);
      }
      const T* const step = steps + stage * 2 * Of::kStepTile;
      const float* const step_statistics = statistics + stage * 2 * Of::kStep + 2 * (lane % 4);
      const unsigned char* const mask_tile = mask_tiles + stage * a.mask_tile.bytes;
      const bool whole = row + Of::kStep <= sequence.rows && row >= sequence.rows_from(a, first + Of::kHeld - 1) &&
                         row + Of::kStep <= sequence.rows_to(a, first);
      stage ^= 1;
#pragma unroll 1
      for (int down = 0; down < Of::kStep; down += Of::kRowsAtOnce) {
        const T* const q_tile = step + down * kPitch<T, kD>;
        const T* const grad_tile = q_tile + Of::kStepTile;
        const float* const row_statistics = step_statistics + down;
        const Place place{sequence, head, row + down, first + warp * 16 * kM,
                          mask_at(a, mask_tile, down, warp * 16 * kM)};
        float scores[kM][kN][4], dots[kM][kN][4];
        multiply_rows<T, kD>(scores, k_warp, q_tile);
        if (kWantKeys) multiply_rows<T, kD>(dots, v_warp, grad_tile);
        else set_zero(dots);
        differentiate<T, kPlain, true, true>(
            a, place, whole, scores, dots, [&](int, int n, int e) { return row_statistics[8 * n + e % 2]; },
            [&](int, int n, int e) { return row_statistics[Of::kStep + 8 * n + e % 2]; });
        if constexpr (kWantValues) multiply_columns<T, kD>(v_sums, scores, grad_tile);
        if constexpr (kWantKeys) multiply_columns<T, kD>(k_sums, dots, q_tile);
      }
    }
  }
  if (rows_from >= rows_to) {
    end_copies();
    wait_copies<0>();
    __syncthreads();
  }
  const int warp_first = first + warp * 16 * kM;
  float factor[kM][2];
  if constexpr (kWantKeys) {
#pragma unroll
    for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = a.scale;
    if (grad_k != nullptr) {
      store_rows<T, kD, kM, KeyRows<kM>>(k_sums, factor, const_cast<T*>(k_warp),
                            grad_k + sequence.key_offset(g.grad_k_strides, task.head, warp_first), g.grad_k_strides[2],
                            sequence.keys - warp_first, head_dim);
    }
  }
  if constexpr (kWantValues) {
#pragma unroll
    for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = a.dropout.seed != nullptr ? a.dropout.scale : 1.f;
    if (grad_v != nullptr) {
      store_rows<T, kD, kM, KeyRows<kM>>(v_sums, factor, const_cast<T*>(v_warp),
                            grad_v + sequence.key_offset(g.grad_v_strides, task.head, warp_first), g.grad_v_strides[2],
                            sequence.keys - warp_first, head_dim);
    }
  }
}

template <class T, int kD, bool kPlain>
struct BackwardRowTiles {
  static constexpr AttentionTiles kSizes = backward_row_tiles(sizeof(T), kD, kPlain);
  static constexpr int kM = kSizes.m, kWarps = kSizes.warps, kThreads = kSizes.threads(), kShared = kSizes.shared;
  static constexpr int kHeld = kSizes.held(), kStep = kSizes.step;
  static constexpr int kHeldTile = kHeld * kPitch<T, kD>, kStepTile = kStep * kPitch<T, kD>;
  using Order = KeyColumns<kStep / 8>;
};

template <class T, int kD, bool kPlain>
__global__ void __launch_bounds__(BackwardRowTiles<T, kD, kPlain>::kThreads, 2)
    attention_backward_rows(const __grid_constant__ AttentionBackward g, int tiles) {
  using Of = BackwardRowTiles<T, kD, kPlain>;
  constexpr int kM = Of::kM, kN = Of::kStep / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const grad_tile = q_tile + Of::kHeldTile;
  T* const steps = grad_tile + Of::kHeldTile;  // two stages of k and v

  const Attention& a = g.a;
  const fuseline_attention& c = a.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_dim = int(c.head_dim);
  const Task task(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
  T* const grad_q = static_cast<T*>(g.grad_q);
  if (c.cu_seqlens_q != nullptr && task.sequence == c.sequences) {
    store_zeros_behind<T, Of::kThreads>(grad_q, g.grad_q_strides, task.head, c.cu_seqlens_q[task.sequence], c.seqlen_q,
                                        task.tile, tiles, Of::kHeld, head_dim);
    return;
  }
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kHeld, last = min(first + Of::kHeld, sequence.rows) - 1;
  if (first > last) return;
  const int warp_first = first + warp * 16 * kM, kv_head = task.head / a.group;
  copy_tile<T, Of::kHeld, kD, Of::kThreads>(
      q_tile, static_cast<const T*>(c.q) + sequence.row_offset(c.q_strides, task.head, first), c.q_strides[2],
      sequence.rows - first, head_dim);
  copy_tile<T, Of::kHeld, kD, Of::kThreads>(
      grad_tile, static_cast<const T*>(g.grad_out) + sequence.row_offset(g.grad_out_strides, task.head, first),
      g.grad_out_strides[2], sequence.rows - first, head_dim);
  unsigned char* const mask_tiles = shared + Of::kShared;
  const auto copy_keys = [&](int key) {
    T* const tile = steps + key / Of::kStep % 2 * 2 * Of::kStepTile;
    copy_tile<T, Of::kStep, kD, Of::kThreads, typename Of::Order>(
        tile, static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, kv_head, key), c.k_strides[2],
        sequence.keys - key, head_dim);
    copy_tile<T, Of::kStep, kD, Of::kThreads, typename Of::Order>(
        tile + Of::kStepTile, static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, kv_head, key),
        c.v_strides[2], sequence.keys - key, head_dim);
    if constexpr (!kPlain) {
      copy_mask<T, Of::kHeld, Of::kStep, Of::kThreads>(mask_tiles + key / Of::kStep % 2 * a.mask_tile.bytes, a, sequence,
                                                       task.head, first, key);
    }
    end_copies();
  };
  const int keys_from = sequence.keys_from(a, first) / Of::kStep * Of::kStep, keys_to = sequence.keys_to(a, last);
  const int whole_from = sequence.keys_from(a, first + Of::kHeld - 1), whole_to = sequence.keys_to(a, first);
  if (keys_from < keys_to) copy_keys(keys_from);

  float lse[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_first + 16 * m + 8 * half + lane / 4;
      const bool there = row < sequence.rows;
      const int64_t at = sequence.statistic(g, task.head, there ? row : first);
      lse[m][half] = there ? g.lse_log2[at] : kInfinity;
      delta[m][half] = there ? g.delta[at] : 0.f;
    }
  float sums[kM][kD / 8][4];
  set_zero(sums);
  const T* const q_warp = q_tile + warp * 16 * kM * kPitch<T, kD>;
  const T* const grad_warp = grad_tile + warp * 16 * kM * kPitch<T, kD>;
  for (int key = keys_from; key < keys_to; key += Of::kStep) {
    wait_copies<0>();
    __syncthreads();
    if (key + Of::kStep < keys_to) copy_keys(key + Of::kStep);
    const T* const k_tile = steps + key / Of::kStep % 2 * 2 * Of::kStepTile;

    float scores[kM][kN][4], dots[kM][kN][4];
    const unsigned char* const mask_tile = mask_tiles + key / Of::kStep % 2 * a.mask_tile.bytes;
    const Place place{sequence, task.head, warp_first, key, mask_at(a, mask_tile, warp * 16 * kM, 0)};
    multiply_rows<T, kD>(scores, q_warp, k_tile);
    multiply_rows<T, kD>(dots, grad_warp, k_tile + Of::kStepTile);
    const bool whole = key >= whole_from && key + Of::kStep <= whole_to;
    differentiate<T, kPlain, false, true>(
        a, place, whole, scores, dots, [&](int m, int, int e) { return lse[m][e / 2]; },
        [&](int m, int, int e) { return delta[m][e / 2]; });
    multiply_columns<T, kD>(sums, dots, k_tile);
  }
  if (keys_from >= keys_to) {
    end_copies();
    wait_copies<0>();
    __syncthreads();
  }
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = a.scale;
  store_rows<T, kD, kM>(sums, factor, const_cast<T*>(q_warp),
                        grad_q + sequence.row_offset(g.grad_q_strides, task.head, warp_first), g.grad_q_strides[2],
                        sequence.rows - warp_first, head_dim);
}

template <class T, int kD, bool kPlain>
int launch_backward_tiles(const AttentionBackward& g, const AttentionLaunch& by, void* stream) {
  if (by.kernel == AttentionKernel::rows) return launch_attention(attention_backward_rows<T, kD, kPlain>, g, by, stream);
  if constexpr (kD <= 128) {
    return launch_attention(attention_backward_keys<T, kD, kPlain, true, true>, g, by, stream);
  } else {
    return launch_attention(by.kernel == AttentionKernel::keys_k ? attention_backward_keys<T, kD, kPlain, true, false>
                                                                 : attention_backward_keys<T, kD, kPlain, false, true>,
                            g, by, stream);
  }
}

template <class T>
int launch_backward(const AttentionBackward& g, const AttentionLaunch& by, void* stream) {
  return with_tiles<T>(by, [&](auto width, auto plain) { return launch_backward_tiles<T, width(), plain()>(g, by, stream); });
}

}  // namespace fuseline
