// The norms' forward for rows of 16 bits that keep to 16-byte steps and that registers hold as they came: the same results as
// in norm_forward_held.cuh, of x alone with weights of rows' dtype.
//
// Moves: x read once, y written once; weight and bias come from cache. Does: about 11 operations an element, since a row is
// unpacked twice. Limit: HBM bandwidth. Threads: four vectors of a row each, as in norm_forward_held.cuh, where a thread keeps
// them as fp32 in twice the registers: with fewer, more blocks share a multiprocessor, and more rows are on their way.
#pragma once

#include "choice.h"
#include "launch.cuh"
#include "norm_states.cuh"
#include "packed_rows.cuh"

namespace fuseline {

struct PackedNorm {
  NormForward norm;
  float inverse_n;  // a division here would cost registers
};

template <class T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads, packed_blocks(Layout::kBlocks))
    norm_forward_packed(const PackedNorm given) {
  const NormForward& a = given.norm;
  const float inverse_n = given.inverse_n;
  constexpr int kHeld = Layout::kHeld, kAtATime = Layout::kAtATime, kSize = kVector<T>;
  constexpr bool kEarly = kAtATime == kHeld;
  constexpr int kWarps = Layout::kThreads / kWarp;
  __shared__ __align__(16) Moments shared[kWarps];
  let_next_start();
  const Slots<kHeld> slots(int(unsigned(a.n) / kSize));
  // A block's last rows may be none: those threads read the tensor's last one, and write nothing.
  constexpr bool kOne = Layout::kRows == 1;
  const int64_t row = kOne ? int64_t(blockIdx.x) : min(int64_t(blockIdx.x) * Layout::kRows + threadIdx.y, a.rows - 1);
  const uint4* const x = static_cast<const uint4*>(a.x) + row * slots.vectors;
  wait_for_earlier();
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_now(x + slots.of(k));
  uint4 weight[kAtATime], bias[kAtATime];
  const auto ask_for_weights = [&](int from) {
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) weight[k] = ones<T>(), bias[k] = make_uint4(0, 0, 0, 0);
    if (a.weight) {
#pragma unroll
      for (int k = 0; k < kAtATime && from + k < kHeld; ++k) {
        weight[k] = __ldg(static_cast<const uint4*>(a.weight) + slots.of(from + k));
      }
    }
    if (a.bias) {
#pragma unroll
      for (int k = 0; k < kAtATime && from + k < kHeld; ++k) {
        bias[k] = __ldg(static_cast<const uint4*>(a.bias) + slots.of(from + k));
      }
    }
  };
  if constexpr (kEarly) ask_for_weights(0);

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
  if constexpr (!kEarly) ask_for_weights(0);
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) sums = plus(sums, from_lane(sums, by));
  const int in_last = __popc(__ballot_sync(kAllLanes, slots.has_last));  // of this warp
  const float count = float(((kHeld - 1) * kWarp + in_last) * kSize), inverse = __fdividef(1.f, count);
  const Moments mine = a.centred ? about_mean(near, sums, count, inverse) : Moments{0.f, sums.y, count, 0.f};
  const int first = int(threadIdx.x), warps = int(blockDim.x) / kWarp, place = kOne ? 0 : int(threadIdx.y) * warps;
  if (first % kWarp == 0) shared[place + first / kWarp] = mine;
  __syncthreads();
  const Moments whole = combine_few<kWarps>(shared + place, warps, float(int(a.n)), inverse_n, a.centred);
  const float rstd = rstd_of<T>(whole.squares, inverse_n, a.eps);
  const Standard<T> standard(whole.mean, rstd);
  int beside = kOne ? 0 : int(threadIdx.y);
  if (!kOne) forget(beside);  // the row's number, too, is found anew
  const int64_t own = int64_t(blockIdx.x) * Layout::kRows + beside;
  if (!kOne && own >= a.rows) return;
  if (first == 0) keep_statistics(a, own, whole.mean, rstd);
  uint4* const y = static_cast<uint4*>(a.y) + own * slots.vectors;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (!kEarly && k > 0 && k % kAtATime == 0) ask_for_weights(k);
    if (k == kHeld - 1 && !slots.has_last) continue;
    float values[kSize], weights[kSize], biases[kSize];
    forget(raw[k]);  // unpacked anew
    unpack<T>(raw[k], values);
    unpack<T>(weight[k % kAtATime], weights);
    unpack<T>(bias[k % kAtATime], biases);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fmaf(standard(values[i]), weights[i], biases[i]);
    y[slots.of(k)] = pack<T>(values);
  }
}

// ---- host ----

// Of layouts to be measured: those that tell these from other kernels' by how many vectors a thread holds.
template <class T>
auto packed_kernel(int way, int threads) -> void (*)(PackedNorm) {
  if (way == 5) return norm_forward_packed<T, Packing<4, 512, 2, 4>>;
  if (way == 6 && threads <= 256) return norm_forward_packed<T, Packing<4, 256, 5, 2>>;
  if (way == 6 || way == 7) return norm_forward_packed<T, Packing<4, 512, 3, 1>>;
  if (way == 8) return norm_forward_packed<T, Packing<7, 64, 16, 2, 2>>;
  if (way == 9) return norm_forward_packed<T, Packing<7, 128, 8, 2, 4>>;
  return nullptr;
}

// False for rows that it does not take.
template <class T>
bool run_packed(const NormForward& a, const Device& device, void* stream, int& error) {
  if constexpr (sizeof(T) == 2) {
    const RowOverride& measured = row_overrides[FUSELINE_LAYER_NORM_FORWARD];
    if (!measured.given || measured.choice.stages > 0) return false;
    const int way = measured.choice.held - 100;
    const int held = way >= 8 ? 7 : 4, beside = way == 8 ? 2 : way == 9 ? 4 : 1;
    if (way < 5 || way > 9 || a.n % kVector<T> != 0 || ((a.weight || a.bias) && a.fp32_weights)) return false;
    for (const void* tensor : {a.x, a.weight, a.bias, static_cast<const void*>(a.y)}) {
      if (offset_in_vector(tensor) != 0) return false;
    }
    const int64_t vectors = a.n / kVector<T>;
    const int64_t threads = divide_up(divide_up(vectors, held), kWarp) * kWarp;
    if (threads > (held == 7 ? kWarp : kMostThreads) || threads * (held - 1) > vectors) return false;
    error = launch(packed_kernel<T>(way, int(threads)), PackedNorm{a, float(1.0 / double(a.n))},
                   divide_up(a.rows, beside), dim3(unsigned(threads), unsigned(beside)), 0, 1, stream, device.clusters);
    return true;
  }
  return false;
}

}  // namespace fuseline
