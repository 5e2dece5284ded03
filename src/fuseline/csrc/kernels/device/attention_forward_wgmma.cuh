// attention_forward.cuh on Hopper for head dims to 128, by products of warpgroups: blocks of one warpgroup, with 64 query rows.
// Several share a multiprocessor, so that products of one run beside the arithmetic of others.
#pragma once

#include "attention_forward.cuh"
#include "attention_panels.cuh"

namespace fuseline {

template <class T, int kD, bool kPlain>
struct ForwardPanels {
  static constexpr int kThreads = kAttentionThreads, kRows = 64, kKeys = 64;
  static constexpr int kBlocks = kD == 64 ? (kPlain ? 4 : 3) : 2;  // that a multiprocessor has room for
  using Queries = Panels<kD, kRows>;
  using Keys = Panels<kD, kKeys>;
  static constexpr int kShared = forward_panels(kD).shared;
  static_assert(kShared == Queries::kBytes + 4 * Keys::kBytes);
  using Order = KeyColumns<kKeys / 8>;
  static_assert(4 * Keys::kBytes >= kRows * kPitch<T, kD> * int(sizeof(T)));  // results go through them
};

template <class T, int kD, bool kPlain>
__global__ void __launch_bounds__(kAttentionThreads, ForwardPanels<T, kD, kPlain>::kBlocks)
    attention_forward_panels(const __grid_constant__ Attention a, int tiles) {
  using Of = ForwardPanels<T, kD, kPlain>;
  using Keys = typename Of::Keys;
  constexpr int kN = Of::kKeys / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  const typename Of::Queries q_tile{base};
  const uint32_t steps = base + Of::Queries::kBytes;  // two stages of keys and values
  unsigned char* const mask_tiles = memory + Of::kShared;

  const fuseline_attention& c = a.call;
  const int head_dim = int(c.head_dim);
  const Task task(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
  if (c.cu_seqlens_q != nullptr && task.sequence == c.sequences) {
    store_nothing_seen<T, Of::kThreads, Of::kRows>(c, task, tiles);
    return;
  }
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kRows, last = min(first + Of::kRows, sequence.rows) - 1;
  if (first > last) return;

  const int kv_head = task.head / a.group;
  const auto copy_keys = [&](int key) {
    const int stage = key / Of::kKeys % 2;
    const Keys tile{steps + stage * 2 * Keys::kBytes};
    copy_panels<T, Of::kThreads, typename Of::Order>(
        tile, static_cast<const T*>(c.k) + sequence.key_offset(c.k_strides, kv_head, key), c.k_strides[2], sequence.keys - key,
        head_dim);
    copy_panels<T, Of::kThreads, typename Of::Order>(
        Keys{tile.base + Keys::kBytes}, static_cast<const T*>(c.v) + sequence.key_offset(c.v_strides, kv_head, key),
        c.v_strides[2], sequence.keys - key, head_dim);
    if constexpr (!kPlain) {
      copy_mask<T, Of::kRows, Of::kKeys, Of::kThreads>(mask_tiles + stage * a.mask_tile.bytes, a, sequence, task.head, first,
                                                       key);
    }
    end_copies();
  };
  const int keys_from = sequence.keys_from(a, first) / Of::kKeys * Of::kKeys, keys_to = sequence.keys_to(a, last);
  // All rows see the keys in between.
  const int whole_from = sequence.keys_from(a, first + Of::kRows - 1), whole_to = sequence.keys_to(a, first);
  copy_panels<T, Of::kThreads, InPlace>(q_tile, static_cast<const T*>(c.q) + sequence.row_offset(c.q_strides, task.head, first),
                                        c.q_strides[2], sequence.rows - first, head_dim);
  if constexpr (!kPlain) clear_mask_rows<Of::kRows, Of::kThreads>(mask_tiles, a.mask_tile, sequence.rows - first);
  if (keys_from < keys_to) copy_keys(keys_from);

  // Scores are kept in units in which `unit` times them is a power of two: dot products if that is all there is to them.
  const float unit = kPlain || keeps_dots(a) ? a.scale_log2 : 1.f;
  float sums[1][kD / 8][4], reference[1][2] = {{-kInfinity, -kInfinity}}, total[1][2] = {{0.f, 0.f}};
  set_zero(sums);
  for (int key = keys_from; key < keys_to; key += Of::kKeys) {
    wait_copies<0>();
    show_to_products();
    __syncthreads();
    if (key + Of::kKeys < keys_to) copy_keys(key + Of::kKeys);
    const int stage = key / Of::kKeys % 2;
    const Keys k_tile{steps + stage * 2 * Keys::kBytes}, v_tile{k_tile.base + Keys::kBytes};

    float scores[1][kN][4];
    wgmma_fence();
    start_rows<T>(scores, q_tile, 0, k_tile, 0);
    wgmma_commit();
    const int warp_row = Lane().warp * 16;
    const Place place{sequence, task.head, first + warp_row, key,
                      mask_at(a, mask_tiles + stage * a.mask_tile.bytes, warp_row, 0)};
    KeptElements<false, 1, kN> kept;
    const bool drops = a.dropout.seed != nullptr;
    if (drops) kept.draw(a, place);  // beside the product
    wgmma_wait<0>();
    hold(scores[0]);
    if constexpr (!kPlain) finish_scores<T, false, false>(a, place, scores, scores);
    if (key < whole_from || key + Of::kKeys > whole_to) hide_bounds<false>(a, place, scores);
    take_powers<kD>(scores, unit, reference, total, sums);
    if (drops) {
      each_element<1, kN>([&](int m, int n, int e) { scores[m][n][e] = kept(m, n, e) ? scores[m][n][e] : 0.f; });
    }
    uint32_t left[kN / 2][4];
    pack_left<T>(left, scores);
    wgmma_fence();
    start_columns<T>(sums, left, v_tile);
    wgmma_commit();
    wgmma_wait<0>();
    hold(sums[0]);
  }
  end_copies();
  wait_copies<0>();
  __syncthreads();
  T* const through = reinterpret_cast<T*>(memory + Of::Queries::kBytes) + Lane().warp * 16 * kPitch<T, kD>;
  store_sums<T, kD, 1>(a, tiles, sums, reference, total, through);
}

template <class T>
int launch_forward_panels(const Attention& a, const AttentionLaunch& by, void* stream) {
  return with_size<64, 128>(by.width, [&](auto width) {
    return launch_attention(by.plain ? attention_forward_panels<T, width(), true> : attention_forward_panels<T, width(), false>, a,
                            by, stream);
  });
}

}  // namespace fuseline
