// Softmax without a mask at a scale above 0, of rows of 16 bits that keep to 16-byte steps and that a block's registers hold as
// they came (packed_rows.cuh): the same results as softmax_forward_rows.
//
// Moves: x read once, y written once. Does: about 8 operations and two powers an element. Limit: HBM bandwidth. From 1,600 to
// 16,384 elements it reads 0.974 to 0.983 of the copy bandwidth, in fp32 0.961 to 0.970.
#pragma once

#include "device/launch.cuh"
#include "device/overlap.cuh"
#include "device/packed_rows.cuh"
#include "device/powers.cuh"
#include "softmax.cuh"

namespace fuseline {

// A multiprocessor has at least kBlocks of the longest rows' blocks.
template <class T, int kBlocks>
__global__ void __launch_bounds__(kMostThreads, packed_blocks(kBlocks)) softmax_forward_packed(const SoftmaxForward a) {
  constexpr int kHeld = kPackedVectors, kSize = kVector<T>;
  __shared__ Powers<T> states[kMostThreads / kWarp];
  let_next_start();
  const Slots slots(int(unsigned(a.n) / kSize));
  const float unit = unit_of<T>(a.scale);
  const uint4* const x = static_cast<const uint4*>(a.x) + int64_t(blockIdx.x) * slots.vectors;
  wait_for_earlier();
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_now(x + slots.of(k));
  if (!slots.has_last) raw[kHeld - 1] = make_uint4(kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>);
  Powers<T> whole;
  whole.take(raw, unit);
  whole = whole.over_warp(unit);
  const int warps = int(blockDim.x) / kWarp;
  if (warps > 1) {
    if (threadIdx.x % kWarp == 0) states[threadIdx.x / kWarp] = whole;
    __syncthreads();
    whole = gather(states, warps, unit);
  }
  const Top<T> top(whole.max, unit);
  const Share share = divide(1.f, whole.sum);
  uint4* const y = static_cast<uint4*>(a.y) + int64_t(blockIdx.x) * slots.vectors;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k == kHeld - 1 && !slots.has_last) continue;
    float value[kSize];
    forget(raw[k]);  // unpacked anew
    unpack<T>(raw[k], value);
    top.raise(value, unit);
#pragma unroll
    for (int i = 0; i < kSize; ++i) value[i] = times<T>(value[i], share);
    y[slots.of(k)] = pack<T>(value);
  }
}

}  // namespace fuseline
