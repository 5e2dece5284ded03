// One row of activations times weights of 8 or 4 bits, so few that all of them are on their way at once.
//
// Floor: the bytes of W over the copy bandwidth, 3 us for 3000 x 3000; or what a launch in a chain cannot do before the one
// ahead has ended: x comes, is multiplied, the sums meet and leave. That is 1.3 us for 1000 x 1000.
//
// A block has 1 / kSplit of a tile's rows and all of their columns: a warp takes kSplit pieces at a time, 512 bytes together,
// of 32 columns in int8 and 64 in int4, and has asked for all of its weights when it waits for the launch ahead. No two warps
// of a block want the same of x, so that it comes from the L2 to the lanes that multiply it. Nothing is left to balance: 376
// blocks of 3000 x 3000 in int8 take 4.1 us, where the streams (linear/linear_stream.cuh), of 188 tiles two at most to a
// multiprocessor, take 6.4.

#include "linear_kernels.h"

namespace fuseline {
namespace {

template <class Weights, int kSplit, int kSteps>
constexpr int kAtOnce = kSplit == 1 || (Weights::kGrouped && kSteps > 4) ? 2 : 3;  // blocks of a multiprocessor

template <class T, class Weights, int kSplit, int kSteps>
__global__ void __launch_bounds__(kLinearThreads, kAtOnce<Weights, kSplit, kSteps>)
    gemv_quantized_kernel(const __grid_constant__ LinearArguments a) {
  constexpr int kLanes = kWarp / kSplit, kRows = kTileRows / kSplit, kGroups = kRows / 2;  // of a piece, of the block
  constexpr bool kInt4 = Weights::kGrouped;
  constexpr int kBytes = kWarp * 16, kHalves = kInt4 ? 2 : 1, kColumns = kHalves * 32, kPieces = 2 / kHalves;
  __shared__ float parts[kLinearWarps * kSplit][kRows];
  if (a.overlap) let_next_start();  // its weights may come while this waits, too
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp, quad = lane % 4;
  const int part = lane / kLanes, group = lane % kLanes / 4;  // which piece, which rows of the block: group, group + kGroups
  const int tile = int(blockIdx.x) / kSplit, first_group = int(blockIdx.x) % kSplit * kGroups;
  const auto piece_of = [&](int step) { return (step * kLinearWarps + warp) * kSplit + part; };

  // The row of W that this thread writes.
  const int row = tile * kTileRows + first_group + thread % kGroups + thread % kRows / kGroups * 8;
  const bool writes = thread < kRows && row < a.n;
  float scale = 1.f;
  uint4 raw[kSteps], x[kSteps][kHalves];
  [[maybe_unused]] uint32_t scales[kSteps];  // int4: of rows `group` and `group + kGroups`
  const auto load = [&] {
    const char* const from = a.weight + int64_t(tile) * a.chunks * (kPieces * kBytes) + ((first_group + group) * 4 + quad) * 16;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      raw[s] = make_uint4(0, 0, 0, 0);
      if (piece_of(s) < kPieces * a.chunks) raw[s] = load_once(from + piece_of(s) * kBytes);
      if constexpr (kInt4) {
        const int of = min((2 * piece_of(s)) >> a.group_shift, a.groups - 1);
        scales[s] = __ldg(a.scales + (int64_t(tile) * a.groups + of) * 8 + first_group + group);
      }
    }
    if (!kInt4 && writes) scale = __uint_as_float(__ldg(a.scales + row));
  };
  if (a.overlap) load();
  wait_for_earlier();
  if (!a.overlap) {
    let_next_start();
    load();
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int column = piece_of(s) * kColumns + half * 32 + quad * 8;
      x[s][half] = make_uint4(0, 0, 0, 0);
      if (column < a.k) x[s][half] = *reinterpret_cast<const uint4*>(a.x + column * 2);
    }
  }
  float sums[2] = {}, even[4] = {}, odd[4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t w[2][4];
      if constexpr (kInt4) {
        const uint32_t zero[2] = {kIntegers<T> + 0x00080008u, kIntegers<T> + 0x00080008u};
        Weights::template step<T>(w[0], half == 0 ? raw[s].x : raw[s].z, zero);
        Weights::template step<T>(w[1], half == 0 ? raw[s].y : raw[s].w, zero);
      } else {
        Weights::template step<T>(w[0], raw[s].x, raw[s].y);
        Weights::template step<T>(w[1], raw[s].z, raw[s].w);
      }
      mma_16816<T>(even, w[0], x[s][half].x, x[s][half].y);
      mma_16816<T>(odd, w[1], x[s][half].z, x[s][half].w);
    }
    if (!kInt4 && s + 1 < kSteps) continue;
    const float2 of_rows = kInt4 ? unpack_pair<__nv_bfloat16>(scales[s]) : make_float2(1.f, 1.f);
    sums[0] = fmaf(of_rows.x, even[0] + odd[0], sums[0]);
    sums[1] = fmaf(of_rows.y, even[2] + odd[2], sums[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) even[i] = odd[i] = 0.f;
  }
  // Column c of the products is of the x of lanes 4 c to 4 c + 3. A lane has columns 2 quad and 2 quad + 1: one that is of its
  // own piece has its rows' sums.
  if (2 * quad == part * kGroups) {
    parts[warp * kSplit + part][group] = sums[0];
    parts[warp * kSplit + part][group + kGroups] = sums[1];
  }
  __syncthreads();
  if (!writes) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kLinearWarps * kSplit; ++i) sum += parts[i][thread];
  const float shift = a.bias ? to_float(reinterpret_cast<const T*>(a.bias)[row]) : 0.f;
  reinterpret_cast<T*>(a.y)[row] = from_float<T>(fmaf(sum, scale, shift));
}

template <class T>
LinearFunction int8_kernel_of(const LinearPlan& plan) {
  if (plan.tile_parts == 4) return gemv_quantized_kernel<T, WeightsInt8, 4, 4>;
  return plan.pieces == 2   ? gemv_quantized_kernel<T, WeightsInt8, 2, 2>
         : plan.pieces == 4 ? gemv_quantized_kernel<T, WeightsInt8, 2, 4>
                            : gemv_quantized_kernel<T, WeightsInt8, 2, 6>;
}

template <class T>
LinearFunction int4_kernel_of(const LinearPlan& plan) {
  if (plan.tile_parts == 1) {
    return plan.pieces == 4 ? gemv_quantized_kernel<T, WeightsInt4, 1, 4> : gemv_quantized_kernel<T, WeightsInt4, 1, 8>;
  }
  return plan.pieces == 2   ? gemv_quantized_kernel<T, WeightsInt4, 2, 2>
         : plan.pieces == 4 ? gemv_quantized_kernel<T, WeightsInt4, 2, 4>
                            : gemv_quantized_kernel<T, WeightsInt4, 2, 6>;
}

}  // namespace

LinearFunction gemv_quantized_kernel_of(const LinearPlan& plan, int format) {
  return format == FUSELINE_WEIGHT_INT8 ? int8_kernel_of<__nv_bfloat16>(plan) : int4_kernel_of<__nv_bfloat16>(plan);
}

}  // namespace fuseline
