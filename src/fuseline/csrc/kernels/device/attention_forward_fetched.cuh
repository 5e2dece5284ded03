// Attention forward of plain scores on Hopper (sm_90a), head dims to 128: blocks of two warpgroups, of 64 query rows each, that
// share the tiles of keys and values, which bulk copies fetch. It computes what attention_forward.cuh says.
//
// A tile of keys comes from the L2 once for 128 rows; blocks of one warpgroup ask for it twice. The warpgroups go on apart: each
// warp says when it has read a stage, and the block's first thread fills it again some tiles later, so that it seldom waits for
// the other warpgroup. A tile's product with the values and the next tile's with the keys run one behind the other, beside the
// arithmetic of the block's other warpgroup and of those of another block.
#pragma once

#include "attention_forward.cuh"
#include "attention_panels.cuh"
#include "tensor_boxes.cuh"
#include "tensor_map.h"

namespace fuseline {

struct FetchedForward : Attention {
  CUtensorMap q, k, v;
};

template <class T, int kD>
struct ForwardFetched {
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 128, kKeys = 64;
  static constexpr int kStages = kD == 64 ? 4 : 3, kBlocks = kD == 64 ? 2 : 1;
  static constexpr int kLag = kStages - 2;  // a stage is filled again so many tiles after it was read
  using Queries = Panels<kD, kRows>;
  using Keys = Panels<kD, kKeys>;
  static constexpr int kAtStages = Queries::kBytes, kAtResults = kAtStages + kStages * 2 * Keys::kBytes;
  static constexpr int kAtBarriers = kAtResults + kRows * kPitch<T, kD> * int(sizeof(T));
  static constexpr int kShared = kAtBarriers + (1 + 2 * kStages) * int(sizeof(uint64_t));
};

// Fetches rows of a head, 64 columns at a time.
template <int kD, int kRows>
__device__ __forceinline__ void fetch_panels(const Panels<kD, kRows>& to, const CUtensorMap* map, uint64_t* barrier, int row, int head,
                                             int batch) {
#pragma unroll
  for (int panel = 0; panel < kD / 64; ++panel) {
    copy_box_of_four(to.base + panel * Panels<kD, kRows>::kPanel, map, barrier, 64 * panel, row, head, batch);
  }
}

template <class T, int kD>
__global__ void __launch_bounds__(ForwardFetched<T, kD>::kThreads, ForwardFetched<T, kD>::kBlocks)
    attention_forward_fetched(const __grid_constant__ FetchedForward a, int tiles) {
  using Of = ForwardFetched<T, kD>;
  using Keys = typename Of::Keys;
  constexpr int kN = Of::kKeys / 8, kStages = Of::kStages;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(memory));
  uint64_t* const queries = reinterpret_cast<uint64_t*>(memory + Of::kAtBarriers);  // are there
  uint64_t *const full = queries + 1, *const empty = full + kStages;
  if (threadIdx.x == 0) {
    barrier_init(queries, 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, Of::kWarps);
    }
    publish_barriers();
  }
  __syncthreads();

  const fuseline_attention& c = a.call;
  const Task task(tiles, int(c.heads), c.causal != FUSELINE_CAUSAL_NONE);
  const Sequence sequence(c, task.sequence);
  const int first = task.tile * Of::kRows, last = min(first + Of::kRows, sequence.rows) - 1;
  // This warpgroup's rows; where it has none, those of the other, whose tiles it goes through with it.
  const int mine = first + (threadIdx.x / 128) * 64, my_last = min(mine + 63, sequence.rows - 1);
  const auto tiles_to = [&](int row) { return (max(0, sequence.keys_to(a, row)) + Of::kKeys - 1) / Of::kKeys; };
  const int from = sequence.keys_from(a, first) / Of::kKeys, to = tiles_to(my_last), last_to = tiles_to(last);
  const int whole_from = sequence.keys_from(a, my_last), whole_to = sequence.keys_to(a, min(mine, my_last));
  const typename Of::Queries q_tile{base};
  const auto keys_of = [&](int stage) { return Keys{base + Of::kAtStages + stage * 2 * Keys::kBytes}; };
  const auto fetch = [&](int tile) {
    const int stage = (tile - from) % kStages;
    const Keys k_tile = keys_of(stage), v_tile{k_tile.base + Keys::kBytes};
    barrier_expect(full + stage, 2 * Keys::kBytes);
    fetch_panels(k_tile, &a.k, full + stage, tile * Of::kKeys, task.head / a.group, task.sequence);
    fetch_panels(v_tile, &a.v, full + stage, tile * Of::kKeys, task.head / a.group, task.sequence);
  };
  if (threadIdx.x == 0) {
    barrier_expect(queries, Of::Queries::kBytes);
    fetch_panels(q_tile, &a.q, queries, first, task.head, task.sequence);
#pragma unroll 1
    for (int tile = from; tile < min(from + kStages, last_to); ++tile) fetch(tile);
  }

  float sums[1][kD / 8][4], reference[1][2] = {{-kInfinity, -kInfinity}}, total[1][2] = {{0.f, 0.f}};
  float scores[1][kN][4];
  set_zero(sums);
  const auto wait_for = [&](int number) { barrier_wait(full + number % kStages, number / kStages & 1); };
  const auto start_scores = [&](int number) { start_rows<T>(scores, q_tile, mine - first, keys_of(number % kStages), 0); };
  const auto attend = [&](int number, auto which) {
    constexpr bool kLast = decltype(which)::value;
    const int read = number - Of::kLag;
    if (threadIdx.x == 0 && read >= 0 && from + read + kStages < last_to) {
      barrier_wait(empty + read % kStages, read / kStages & 1);
      fetch(from + read + kStages);
    }
    __syncwarp();
    const int key = (from + number) * Of::kKeys;
    if (key < whole_from || key + Of::kKeys > whole_to) {
      const Lane at;
      const int row = mine + at.warp % 4 * 16 + at.lane / 4, column = key + 2 * (at.lane % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = row + 8 * half < sequence.rows;
        const int seen_from = sequence.keys_from(a, row + 8 * half) - column;
        const int seen_to = there ? sequence.keys_to(a, row + 8 * half) - column : INT_MIN;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e < seen_from || 8 * n + e >= seen_to) scores[0][n][2 * half + e] = -kInfinity;
          }
      }
    }
    take_powers<kD>(scores, a.scale_log2, reference, total, sums);
    uint32_t left[kN / 2][4];
    pack_left<T>(left, scores);
    if constexpr (!kLast) wait_for(number + 1);
    wgmma_fence();
    start_columns<T>(sums, left, Keys{keys_of(number % kStages).base + Keys::kBytes});
    wgmma_commit();
    if constexpr (!kLast) {
      start_scores(number + 1);
      wgmma_commit();
    }
    wgmma_wait<0>();
    hold(sums[0]);
    if constexpr (!kLast) {
      hold(scores[0]);
      const Lane at;
      if (at.lane == 0) barrier_arrive(empty + number % kStages);
    }
  };
  if (from < to) {
    barrier_wait(queries, 0);
    wait_for(0);
    wgmma_fence();
    start_scores(0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(scores[0]);
#pragma unroll 1
    for (int number = 0; number < to - from - 1; ++number) attend(number, std::false_type{});
    attend(to - from - 1, std::true_type{});
  }
  const Lane at;
  T* const through = reinterpret_cast<T*>(memory + Of::kAtResults) + at.warp * 16 * kPitch<T, kD>;
  store_sums<T, kD, 1, Of::kRows>(a, tiles, sums, reference, total, through);
}

template <class T, int kD>
int launch_forward_fetched_of(const Attention& given, void* stream) {
  using Of = ForwardFetched<T, kD>;
  FetchedForward a{given, {}, {}, {}};
  const fuseline_attention& c = a.call;
  int code = make_heads_map(a.q, c.q, c.q_strides, c.batch, c.heads, c.seqlen_q, c.head_dim, Of::kRows, c.dtype);
  if (code == 0) code = make_heads_map(a.k, c.k, c.k_strides, c.batch, c.kv_heads, c.seqlen_k, c.head_dim, Of::kKeys, c.dtype);
  if (code == 0) code = make_heads_map(a.v, c.v, c.v_strides, c.batch, c.kv_heads, c.seqlen_k, c.head_dim, Of::kKeys, c.dtype);
  if (code != 0) return code;
  const AttentionGrid grid(c, c.heads, false, Of::kRows);
  return launch_attention(attention_forward_fetched<T, kD>, a, grid, Of::kThreads, Of::kShared, stream);
}

// FUSELINE_UNSUPPORTED where the bulk copies do not take the tensors.
template <class T>
int launch_forward_fetched(const Attention& a, void* stream) {
  return a.call.head_dim <= 64 ? launch_forward_fetched_of<T, 64>(a, stream) : launch_forward_fetched_of<T, 128>(a, stream);
}

}  // namespace fuseline
