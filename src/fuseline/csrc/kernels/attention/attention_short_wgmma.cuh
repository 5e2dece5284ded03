// Attention over short sequences of up to 128 rows and keys by products of warpgroups (wgmma, sm_90a): what its forward and
// backward share. They read shared memory a quarter as often as products of warps, which wait for it as long as for HBM.
//
// A block has two warpgroups, of 64 rows each. Who holds what of a product is as in mma.cuh, so that all that happens to the
// scores is that of attention_short_scores.cuh. Blocks of hidden keys are not left out.
#pragma once

#include "attention_short_launch.cuh"
#include "attention_short_scores.cuh"
#include "device/waiting.cuh"
#include "device/wgmma_panels.cuh"

namespace fuseline::short_attention {

constexpr int kRowsOfGroup = 64;  // of a warpgroup

__device__ __forceinline__ Place place_of_group() {
  const unsigned thread = thread_number();
  return {int(thread % kWarp), int(thread % kWarp / 4), int(thread % 4), int(thread / kWarp * 16)};
}

// The warpgroup's number, the same register for all of a warp.
__device__ __forceinline__ int group_number() { return __shfl_sync(0xffffffffu, thread_number() / 128, 0); }

// sums[64, kLongest] = the warpgroup's rows of left[kLongest, kD] * right[kLongest, kD]^T.
template <class T, int kD>
__device__ __forceinline__ void multiply_rows(float (&sums)[kLongest / 8][4], const Panels<kD, kLongest>& left,
                                              const Panels<kD, kLongest>& right) {
  const int row = group_number() * kRowsOfGroup;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    wgmma_shared<T, kLongest, false>(sums, left.rows(row, k), right.rows(0, k), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(sums);
}

// sums[64, kD] = held[64, kLongest] * right[kLongest, kD].
template <class T, int kD>
__device__ __forceinline__ void multiply_held(float (&sums)[kD / 8][4], const uint32_t (&held)[kLongest / 16][4],
                                              const Panels<kD, kLongest>& right) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kLongest / 16; ++k) wgmma_held<T, kD>(sums, held[k], right.columns(0, k), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  hold(sums);
}

// sums[64, kD] = the warpgroup's columns of left[kLongest, kLongest], turned, * right[kLongest, kD].
template <class T, int kD>
__device__ __forceinline__ void multiply_columns(float (&sums)[kD / 8][4], const Panels<kLongest, kLongest>& left,
                                                 const Panels<kD, kLongest>& right) {
  const int group = group_number();
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kLongest / 16; ++k) {
    wgmma_shared<T, kD, true>(sums, left.columns(group, k), right.columns(0, k), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(sums);
}

}  // namespace fuseline::short_attention
