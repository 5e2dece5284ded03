// attention_grad_mask.cuh on Hopper for head dims to 128, by products of warpgroups: blocks of one, with 64 rows and keys. Three
// share a multiprocessor, so that one's products and copies run beside another's scores. 8 x 16 x 1,024 x 64, with delta: 278 us;
// blocks of 128 rows and keys: two warpgroups with products ahead of the scores 327, without 276, four 303.
#pragma once

#include "attention_grad_mask.cuh"
#include "attention_panels.cuh"

namespace fuseline {

template <class T, int kD>
struct GradMaskPanels {
  static constexpr int kRows = 64, kWarps = 4, kThreads = 32 * kWarps, kM = 1;
  static constexpr int kRowWarps = kRows / 16, kKeyWarps = kWarps / kRowWarps, kWarpKeys = kRows / kKeyWarps;
  static constexpr int kKeysAtOnce = 64, kN = kKeysAtOnce / 8, kParts = kWarpKeys / kKeysAtOnce;
  using Tile = Panels<kD, kRows>;
  static constexpr int kTile = Tile::kBytes, kStages = grad_mask_panels(kD).stages, kShared = kStages * 4 * kTile;
  static_assert(kShared == grad_mask_panels(kD).shared);
  static constexpr int kBlocks = 3, kPartsAhead = 1;
  using Order = KeyColumns<kN>;

  static __device__ __forceinline__ Tile tile(const unsigned char* at) { return {uint32_t(__cvta_generic_to_shared(at))}; }
  template <class Slots>
  static __device__ __forceinline__ void copy(unsigned char* to, const T* from, int64_t stride, int rows, int head_dim) {
    copy_panels<T, kThreads, Slots>(tile(to), from, stride, rows, head_dim);
  }
  static __device__ __forceinline__ void show() { show_to_products(); }
  static __device__ __forceinline__ void start(float (&scores)[kM][kN][4], float (&dots)[kM][kN][4], const unsigned char* stage,
                                               int row, int key) {
    const int group_row = __shfl_sync(0xffffffffu, row, 0) / 64 * 64;  // of the warpgroup; the same register for all of a warp
    wgmma_fence();
    start_rows<T>(scores, tile(stage), group_row, tile(stage + 2 * kTile), key);
    start_rows<T>(dots, tile(stage + kTile), group_row, tile(stage + 3 * kTile), key);
    wgmma_commit();
  }
  template <int kPending>
  static __device__ __forceinline__ void finish(float (&scores)[kM][kN][4], float (&dots)[kM][kN][4]) {
    wgmma_wait<kPending>();
    hold(scores[0]);
    hold(dots[0]);
  }
};

}  // namespace fuseline
