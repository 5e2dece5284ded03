// attention_grad_mask.cuh on Hopper for head dims to 64, by products of two warpgroups: those of a quarter of a block's keys are
// under way while what happens to the scores of the quarter before does.
#pragma once

#include "attention_grad_mask.cuh"
#include "attention_panels.cuh"

namespace fuseline {

template <class T>
struct GradMaskPanels {
  static constexpr int kRows = 128, kThreads = 256, kM = 1, kKeyWarps = 1, kWarpKeys = kRows;
  static constexpr int kKeysAtOnce = 32, kN = kKeysAtOnce / 8, kParts = kWarpKeys / kKeysAtOnce;
  using Tile = Panels<64, kRows>;
  static constexpr int kTile = Tile::kBytes, kStages = 2, kShared = kStages * 4 * kTile;
  static constexpr int kBlocks = 1, kPartsAhead = 2;
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

template <class T>
int launch_grad_mask_panels(const AttentionGradMask& of, int64_t blocks, void* stream) {
  return launch_grad_mask_kernel<T, GradMaskPanels<T>>(of, blocks, stream);
}

}  // namespace fuseline
