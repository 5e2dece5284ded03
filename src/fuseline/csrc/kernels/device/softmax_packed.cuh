// Softmax without a mask at a scale above 0, of rows of 16 bits that keep to 16-byte steps and that a block's registers hold as
// they came (packed_rows.cuh): the same results as softmax_forward_rows.
//
// Moves: x read once, y written once. Does: about 8 operations and two powers an element. Limit: HBM bandwidth.
#pragma once

#include "choice.h"
#include "overlap.cuh"
#include "packed_rows.cuh"
#include "powers.cuh"
#include "softmax.cuh"

namespace fuseline {

template <class T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads, packed_blocks(Layout::kBlocks))
    softmax_forward_packed(const SoftmaxForward a) {
  constexpr int kHeld = Layout::kHeld, kSize = kVector<T>;
  __shared__ Powers<T> states[Layout::kThreads / kWarp];
  let_next_start();
  const Slots<kHeld> slots(int(unsigned(a.n) / kSize));
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

// ---- host ----

// Of layouts to be measured: those that tell these from other kernels' by how many vectors a thread holds. False for rows that
// it does not take, which are those of one dtype at multiples of 16 bytes.
template <class T>
bool run_packed(const SoftmaxForward& a, const Device& device, void* stream, int& error) {
  if constexpr (sizeof(T) == 2) {
    const RowOverride& measured = row_overrides[FUSELINE_SOFTMAX_FORWARD];
    const int way = measured.choice.held - 100;
    const int64_t vectors = a.n / kVector<T>, threads = divide_up(divide_up(vectors, 4), kWarp) * kWarp;
    if (!measured.given || way < 5 || way > 7 || !(a.scale > 0) || threads > kMostThreads || threads * 3 > vectors) {
      return false;
    }
    auto kernel = softmax_forward_packed<T, Packing<4, 512, 3, 0>>;
    if (way == 5) kernel = softmax_forward_packed<T, Packing<4, 512, 2, 0>>;
    if (way == 6 && threads <= 256) kernel = softmax_forward_packed<T, Packing<4, 256, 5, 0>>;
    error = launch(kernel, a, a.rows, dim3(unsigned(threads)), 0, 1, stream, device.clusters);
    return true;
  }
  return false;
}

}  // namespace fuseline
