// The norms' forward for rows of 16 bits that keep to 16-byte steps and that registers hold as they came: the same results as
// in norm_forward_held.cuh, of x alone with weights of rows' dtype.
//
// Moves: x read once, y written once; weight and bias come from cache. Does: about 11 operations an element, since a row is
// unpacked twice. Limit: HBM bandwidth. Threads: four vectors of a row each, as in norm_forward_held.cuh, where a thread keeps
// them as fp32: of the registers that this spares, weights have some, and are on their way with the row. At 1,600, 5,120, 8,192
// and 12,288 elements a layer norm reads 0.970, 0.978, 0.979 and 0.982 of the copy bandwidth, 0.947, 0.958, 0.963 and 0.963
// there. With weights for two vectors at a time 0.961, 0.972, 0.975, or for one 0.962, 0.974, 0.977 and 0.976, and blocks more
// a multiprocessor for it; seven vectors a lane of a warp read 0.966 at 1,600.
#pragma once

#include "norm_row.cuh"
#include "device/packed_rows.cuh"

namespace fuseline {

struct PackedNorm {
  NormForward norm;
  float inverse_n;  // a division here would cost registers
};

constexpr int kPackedThreads = 512, kPackedBlocks = 2;  // of a block at most, of a multiprocessor at least

template <class T>
__global__ void __launch_bounds__(kPackedThreads, packed_blocks(kPackedBlocks)) norm_forward_packed(const PackedNorm given) {
  const NormForward& a = given.norm;
  const float inverse_n = given.inverse_n;
  constexpr int kHeld = kPackedVectors, kSize = kVector<T>, kWarps = kPackedThreads / kWarp;
  __shared__ __align__(16) Moments shared[kWarps];
  let_next_start();
  const Slots slots(int(unsigned(a.n) / kSize));
  const int64_t row = blockIdx.x;
  const uint4* const x = static_cast<const uint4*>(a.x) + row * slots.vectors;
  wait_for_earlier();
  uint4 raw[kHeld], weight[kHeld], bias[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_now(x + slots.of(k));
#pragma unroll
  for (int k = 0; k < kHeld; ++k) weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
  if (a.weight) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) weight[k] = __ldg(static_cast<const uint4*>(a.weight) + slots.of(k));
  }
  if (a.bias) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) bias[k] = __ldg(static_cast<const uint4*>(a.bias) + slots.of(k));
  }

  float near = 0.f;
  if (a.centred) {
    float total[kSize];
    unpack<T>(raw[0], total);
#pragma unroll
    for (int i = 1; i < kSize; ++i) total[0] += total[i];
    near = __shfl_sync(kAllLanes, total[0], 0) * (1.f / kSize);
  }
  float2 sums = make_float2(0.f, 0.f);  // of distances from it, and of their squares
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k == kHeld - 1 && !slots.has_last) continue;
    float values[kSize];
    unpack<T>(raw[k], values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float apart = values[i] - near;
      sums.x += apart;
      sums.y = fmaf(apart, apart, sums.y);
    }
  }
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) sums = plus(sums, from_lane(sums, by));
  const int in_last = __popc(__ballot_sync(kAllLanes, slots.has_last));  // of this warp
  const float count = float(((kHeld - 1) * kWarp + in_last) * kSize), inverse = __fdividef(1.f, count);
  const Moments mine = a.centred ? about_mean(near, sums, count, inverse) : Moments{0.f, sums.y, count, 0.f};
  const int first = int(threadIdx.x), warps = int(blockDim.x) / kWarp;
  if (first % kWarp == 0) shared[first / kWarp] = mine;
  __syncthreads();
  const Moments whole = combine_few<kWarps>(shared, warps, float(int(a.n)), inverse_n, a.centred);
  const float rstd = rstd_of<T>(whole.squares, inverse_n, a.eps);
  const Standard<T> standard(whole.mean, rstd);
  if (first == 0) keep_statistics(a, row, whole.mean, rstd);
  uint4* const y = static_cast<uint4*>(a.y) + row * slots.vectors;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k == kHeld - 1 && !slots.has_last) continue;
    float values[kSize], weights[kSize], biases[kSize];
    forget(raw[k]);  // unpacked anew
    unpack<T>(raw[k], values);
    unpack<T>(weight[k], weights);
    unpack<T>(bias[k], biases);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weights[i], biases[i]);
    y[slots.of(k)] = pack<T>(values);
  }
}

}  // namespace fuseline
