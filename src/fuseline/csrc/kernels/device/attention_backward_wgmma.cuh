// attention_backward.cuh on Hopper for head dims to 128, by products of warpgroups: blocks of one warpgroup, with 64 keys or
// query rows that hold still. Several share a multiprocessor, so that products of one run beside the arithmetic of others.
//
// Tiles and what happens to the scores are as there. Limit: the arithmetic on scores, and q and grad_out, or k and v, from L2.
#pragma once

#include "attention_backward.cuh"
#include "attention_panels.cuh"

namespace fuseline {

template <class T, int kD, bool kPlain>
struct BackwardPanels {
  static constexpr int kThreads = 128, kHeld = 64;
  // Blocks that a multiprocessor has registers for, of keys and of rows.
  static constexpr int kKeysBlocks = kD == 64 ? 3 : 2, kRowsBlocks = kD == 64 ? 3 : 2;
  static constexpr int kStep = backward_panels(kD, kPlain).step, kShared = backward_panels(kD, kPlain).shared;
  using Held = Panels<kD, kHeld>;
  using Step = Panels<kD, kStep>;
  static_assert(kShared == 2 * Held::kBytes + 4 * Step::kBytes + 4 * kStep * int(sizeof(float)));
  static_assert(4 * Step::kBytes >= 4 * 16 * kPitch<T, kD> * int(sizeof(T)));  // results go through them
};

template <class T, int kD, bool kPlain>
__global__ void __launch_bounds__(128, BackwardPanels<T, kD, kPlain>::kKeysBlocks)
    attention_backward_keys_panels(const __grid_constant__ AttentionBackward g, int tiles) {
  using Of = BackwardPanels<T, kD, kPlain>;
  using Step = typename Of::Step;
  constexpr int kN = Of::kStep / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  const typename Of::Held k_tile{base}, v_tile{base + Of::Held::kBytes};
  const uint32_t steps = base + 2 * Of::Held::kBytes;  // two stages of q and grad_out
  float* const statistics = reinterpret_cast<float*>(memory + 2 * Of::Held::kBytes + 4 * Step::kBytes);  // of lse and delta

  const Attention& a = g.a;
  const fuseline_attention& c = a.call;
  const int head_dim = int(c.head_dim);
  const Task task(tiles, int(c.kv_heads), false);
  T* const grad_k = static_cast<T*>(g.grad_k);
  T* const grad_v = static_cast<T*>(g.grad_v);
  if (c.cu_seqlens_k != nullptr && task.sequence == c.sequences) {
    const int64_t from = c.cu_seqlens_k[task.sequence];
    const auto clear = [&](T* grad, const int64_t(&strides)[3]) {
      if (grad == nullptr) return;
      store_zeros_behind<T, Of::kThreads>(grad, strides, task.head, from, c.seqlen_k, task.tile, tiles, Of::kHeld, head_dim);
    };
    clear(grad_k, g.grad_k_strides);
    clear(grad_v, g.grad_v_strides);
    return;
  }
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kHeld, last = min(first + Of::kHeld, sequence.keys) - 1;
  if (first > last) return;

  const auto copy_held = [&](const typename Of::Held& to, const void* from, const int64_t(&strides)[3]) {
    copy_panels<T, Of::kThreads, KeyRows<1>>(to, static_cast<const T*>(from) + sequence.key_offset(strides, task.head, first),
                                             strides[2], sequence.keys - first, head_dim);
  };
  copy_held(k_tile, c.k, c.k_strides);
  copy_held(v_tile, c.v, c.v_strides);
  const int rows_from = sequence.rows_from(a, first) / Of::kStep * Of::kStep, rows_to = sequence.rows_to(a, last);
  const int first_head = task.head * a.group, last_head = first_head + a.group - 1;
  unsigned char* const mask_tiles = memory + Of::kShared;
  const auto copy_step = [&](int head, int row, int stage) {
    const uint32_t tile = steps + stage * 2 * Step::kBytes;
    copy_panels<T, Of::kThreads, InPlace>(Step{tile},
                                          static_cast<const T*>(c.q) + sequence.row_offset(c.q_strides, head, row),
                                          c.q_strides[2], sequence.rows - row, head_dim);
    copy_panels<T, Of::kThreads, InPlace>(
        Step{tile + Step::kBytes}, static_cast<const T*>(g.grad_out) + sequence.row_offset(g.grad_out_strides, head, row),
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

  float k_sums[1][kD / 8][4], v_sums[1][kD / 8][4];
  set_zero(k_sums);
  set_zero(v_sums);
  int stage = 0;
  if (rows_from < rows_to) copy_step(first_head, rows_from, 0);
  for (int head = first_head; head <= last_head; ++head) {
    for (int row = rows_from; row < rows_to; row += Of::kStep) {
      wait_copies<0>();
      show_to_products();
      __syncthreads();
      const bool ends = row + Of::kStep >= rows_to;
      if (!ends || head < last_head) copy_step(head + int(ends), ends ? rows_from : row + Of::kStep, stage ^ 1);
      const Step q_tile{steps + stage * 2 * Step::kBytes}, grad_tile{q_tile.base + Step::kBytes};
      const Lane at;
      const float* const step_statistics = statistics + stage * 2 * Of::kStep + 2 * (at.lane % 4);
      const unsigned char* const mask_tile = mask_tiles + stage * a.mask_tile.bytes;
      const bool whole = row + Of::kStep <= sequence.rows && row >= sequence.rows_from(a, first + Of::kHeld - 1) &&
                         row + Of::kStep <= sequence.rows_to(a, first);
      stage ^= 1;
      const Place place{sequence, head, row, first + at.warp * 16, mask_at(a, mask_tile, 0, at.warp * 16)};
      float scores[1][kN][4], dots[1][kN][4];
      wgmma_fence();
      start_rows<T>(scores, k_tile, 0, q_tile, 0);
      start_rows<T>(dots, v_tile, 0, grad_tile, 0);
      wgmma_commit();
      wgmma_wait<0>();
      hold(scores[0]);
      hold(dots[0]);
      differentiate<T, kPlain, true, true>(
          a, place, whole, scores, dots, [&](int, int n, int e) { return step_statistics[8 * n + e % 2]; },
          [&](int, int n, int e) { return step_statistics[Of::kStep + 8 * n + e % 2]; });
      uint32_t left[2][kN / 2][4];
      pack_left<T>(left[0], scores);
      pack_left<T>(left[1], dots);
      wgmma_fence();
      start_columns<T>(v_sums, left[0], grad_tile);
      start_columns<T>(k_sums, left[1], q_tile);
      wgmma_commit();
      wgmma_wait<0>();
      hold(v_sums[0]);
      hold(k_sums[0]);
    }
  }
  end_copies();
  wait_copies<0>();
  __syncthreads();
  const Lane at;
  const int warp_first = first + at.warp * 16;
  T* const through = reinterpret_cast<T*>(memory + 2 * Of::Held::kBytes) + at.warp * 16 * kPitch<T, kD>;
  const auto store = [&](const float(&sums)[1][kD / 8][4], float by, T* grad, const int64_t(&strides)[3]) {
    if (grad == nullptr) return;
    const float factor[1][2] = {{by, by}};
    store_rows<T, kD, 1, KeyRows<1>>(sums, factor, through, grad + sequence.key_offset(strides, task.head, warp_first),
                                     strides[2], sequence.keys - warp_first, head_dim);
  };
  store(k_sums, a.scale, grad_k, g.grad_k_strides);
  store(v_sums, a.dropout.seed != nullptr ? a.dropout.scale : 1.f, grad_v, g.grad_v_strides);
}

struct BackwardRows : AttentionBackward {
  LeftScores left;  // if kLeaves
};

// kLeaves: dy, which is dx then, stays behind for the mask's gradient.
template <class T, int kD, bool kPlain, bool kLeaves>
__global__ void __launch_bounds__(128, BackwardPanels<T, kD, kPlain>::kRowsBlocks)
    attention_backward_rows_panels(const __grid_constant__ BackwardRows g, int tiles) {
  using Of = BackwardPanels<T, kD, kPlain>;
  using Step = typename Of::Step;
  using Order = KeyColumns<Of::kStep / 8>;
  constexpr int kN = Of::kStep / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  const typename Of::Held q_tile{base}, grad_tile{base + Of::Held::kBytes};
  const uint32_t steps = base + 2 * Of::Held::kBytes;  // two stages of k and v

  const Attention& a = g.a;
  const fuseline_attention& c = a.call;
  const int head_dim = int(c.head_dim);
  Task task(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
  int left_at = 0;  // the first of the head's tiles of dy; there are few enough for 32 bits
  if constexpr (kLeaves) {
    left_at = ((task.tile * int(c.batch) + task.sequence) * int(c.heads) + task.head) * g.left.steps;
    task.tile += g.left.first_tile;
  }
  T* const grad_q = static_cast<T*>(g.grad_q);
  if (c.cu_seqlens_q != nullptr && task.sequence == c.sequences) {
    store_zeros_behind<T, Of::kThreads>(grad_q, g.grad_q_strides, task.head, c.cu_seqlens_q[task.sequence], c.seqlen_q,
                                        task.tile, tiles, Of::kHeld, head_dim);
    return;
  }
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kHeld, last = min(first + Of::kHeld, sequence.rows) - 1;
  if (first > last) return;
  const int kv_head = task.head / a.group;
  const auto copy_held = [&](const typename Of::Held& to, const void* from, const int64_t(&strides)[3]) {
    copy_panels<T, Of::kThreads, InPlace>(to, static_cast<const T*>(from) + sequence.row_offset(strides, task.head, first),
                                          strides[2], sequence.rows - first, head_dim);
  };
  copy_held(q_tile, c.q, c.q_strides);
  copy_held(grad_tile, g.grad_out, g.grad_out_strides);
  unsigned char* const mask_tiles = memory + Of::kShared;
  const auto copy_keys = [&](int key) {
    const int stage = key / Of::kStep % 2;
    const Step tile{steps + stage * 2 * Step::kBytes};
    copy_panels<T, Of::kThreads, Order>(tile, static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, kv_head, key),
                                        c.k_strides[2], sequence.keys - key, head_dim);
    copy_panels<T, Of::kThreads, Order>(Step{tile.base + Step::kBytes},
                                        static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, kv_head, key),
                                        c.v_strides[2], sequence.keys - key, head_dim);
    if constexpr (!kPlain) {
      copy_mask<T, Of::kHeld, Of::kStep, Of::kThreads>(mask_tiles + stage * a.mask_tile.bytes, a, sequence, task.head, first,
                                                       key);
    }
    end_copies();
  };
  const int keys_from = sequence.keys_from(a, first) / Of::kStep * Of::kStep, keys_to = sequence.keys_to(a, last);
  const int whole_from = sequence.keys_from(a, first + Of::kHeld - 1), whole_to = sequence.keys_to(a, first);
  if (keys_from < keys_to) copy_keys(keys_from);

  float lse[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + Lane().warp * 16 + 8 * half + Lane().lane / 4;
    const bool there = row < sequence.rows;
    const int64_t at = sequence.statistic(g, task.head, there ? row : first);
    lse[half] = there ? g.lse_log2[at] : kInfinity;
    delta[half] = there ? g.delta[at] : 0.f;
  }
  float sums[1][kD / 8][4];
  set_zero(sums);
  for (int key = keys_from; key < keys_to; key += Of::kStep) {
    wait_copies<0>();
    show_to_products();
    __syncthreads();
    if (key + Of::kStep < keys_to) copy_keys(key + Of::kStep);
    const int stage = key / Of::kStep % 2;
    const Step k_tile{steps + stage * 2 * Step::kBytes}, v_tile{k_tile.base + Step::kBytes};
    const int warp_row = Lane().warp * 16;
    const Place place{sequence, task.head, first + warp_row, key,
                      mask_at(a, mask_tiles + stage * a.mask_tile.bytes, warp_row, 0)};
    float scores[1][kN][4], dots[1][kN][4];
    wgmma_fence();
    start_rows<T>(scores, q_tile, 0, k_tile, 0);
    start_rows<T>(dots, grad_tile, 0, v_tile, 0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(scores[0]);
    hold(dots[0]);
    const bool whole = key >= whole_from && key + Of::kStep <= whole_to;
    differentiate<T, kPlain, false, true>(
        a, place, whole, scores, dots, [&](int, int, int e) { return lse[e / 2]; },
        [&](int, int, int e) { return delta[e / 2]; });
    uint32_t left[kN / 2][4];
    pack_left<T>(left, dots);
    if constexpr (kLeaves) {
      uint4* const to = g.left.at + int64_t(left_at + key / Of::kStep) * (Of::kHeld * Of::kStep / 8) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const uint32_t(&one)[4] = left[i / 2 * 2], (&two)[4] = left[i / 2 * 2 + 1];
        to[i * Of::kThreads] = make_uint4(one[i % 2], one[2 + i % 2], two[i % 2], two[2 + i % 2]);
      }
    }
    wgmma_fence();
    start_columns<T>(sums, left, k_tile);
    wgmma_commit();
    wgmma_wait<0>();
    hold(sums[0]);
  }
  end_copies();
  wait_copies<0>();
  __syncthreads();
  const float factor[1][2] = {{a.scale, a.scale}};
  const Lane at;
  const int warp_first = first + at.warp * 16;
  T* const through = reinterpret_cast<T*>(memory + 2 * Of::Held::kBytes) + at.warp * 16 * kPitch<T, kD>;
  store_rows<T, kD, 1>(sums, factor, through, grad_q + sequence.row_offset(g.grad_q_strides, task.head, warp_first),
                       g.grad_q_strides[2], sequence.rows - warp_first, head_dim);
}

template <class T, int kD, bool kPlain>
int launch_backward_panels_of(const AttentionBackward& g, const AttentionLaunch& by, void* stream) {
  if (by.kernel == AttentionKernel::keys_panels) {
    return launch_attention(attention_backward_keys_panels<T, kD, kPlain>, g, by, stream);
  }
  return launch_attention(attention_backward_rows_panels<T, kD, kPlain, false>, BackwardRows{g, {}}, by, stream);
}

template <class T>
int launch_backward_panels(const AttentionBackward& g, const AttentionLaunch& by, void* stream) {
  return with_size<64, 128>(by.width, [&](auto width) {
    return by.plain ? launch_backward_panels_of<T, width(), true>(g, by, stream)
                    : launch_backward_panels_of<T, width(), false>(g, by, stream);
  });
}

}  // namespace fuseline
