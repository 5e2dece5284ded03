// The loss of each row of a linear head, whose logits are never in memory. See loss/head_loss.cuh.

#include "fuseline_linear_head.h"

#include "head_loss.cuh"

namespace fuseline {
namespace {

// ---- kernels ----

constexpr int kCombineRows = 32, kCombineParts = 16;

struct HeadCombine {
  const float2* parts;
  const float* scores;
  const void* target;
  const float* weight;  // of each word, or null
  float* loss;
  int64_t ignore_index;
  int rows, n, tiles;
  float z_loss;
  bool int32_targets;
};

__device__ __forceinline__ float2 merged(float2 a, float2 b) {
  constexpr float kLog2 = 1.4426950408889634f;
  const float max = fmaxf(a.x, b.x), at = max == -INFINITY ? 0.f : max;
  return make_float2(max, a.y * power_of_two((a.x - at) * kLog2) + b.y * power_of_two((b.x - at) * kLog2));
}

// The rows' losses from the tiles' parts, merged in a fixed order.
__global__ void __launch_bounds__(kCombineRows* kCombineParts) combine_kernel(const HeadCombine a) {
  __shared__ float2 states[kCombineParts][kCombineRows];
  const int lane = int(threadIdx.x) % kCombineRows, part = int(threadIdx.x) / kCombineRows;
  const int row = int(blockIdx.x) * kCombineRows + lane;
  float2 state = make_float2(-INFINITY, 0.f);
  if (row < a.rows) {
#pragma unroll 4
    for (int tile = part; tile < a.tiles; tile += kCombineParts) state = merged(state, a.parts[int64_t(tile) * a.rows + row]);
  }
  states[part][lane] = state;
  __syncthreads();
  if (part > 0 || row >= a.rows) return;
#pragma unroll 1
  for (int i = 1; i < kCombineParts; ++i) state = merged(state, states[i][lane]);
  const int64_t target = a.int32_targets ? int64_t(static_cast<const int32_t*>(a.target)[row])
                                         : static_cast<const int64_t*>(a.target)[row];
  float loss = INFINITY - INFINITY;
  if (target == a.ignore_index) {
    loss = 0.f;
  } else if (target >= 0 && target < a.n) {
    const float lse = state.x + logf(state.y);
    loss = (a.weight ? a.weight[target] : 1.f) * (lse - a.scores[row]) + a.z_loss * lse * lse;
  }
  a.loss[row] = loss;
}

// ---- launcher ----

constexpr int64_t kLeastRows = 1024, kLeastWords = 8192;

}  // namespace
}  // namespace fuseline

using namespace fuseline;

size_t fuseline_head_loss_workspace(int64_t rows, int64_t n) {
  return size_t(divide_up(n, kHeadWide) * rows) * sizeof(float2) + size_t(rows) * sizeof(float);
}

int fuseline_head_loss_takes(const fuseline_head_loss* given) {
  const fuseline_head_loss& call = *given;
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (call.dtype != FUSELINE_BFLOAT16 && call.dtype != FUSELINE_FLOAT16) return false;
  if (call.rows < kLeastRows || call.rows > 0x3fffffff || call.n > 0x3fffffff || call.n < kLeastWords) return false;
  if (call.k % 8 != 0 || call.k < kHeadPieces * kHeadStep || !aligned(call.hidden) || !aligned(call.weight)) return false;
  Device device;
  return current_device(device) == cudaSuccess && device.warpgroups;
}

int fuseline_head_loss_forward(const fuseline_head_loss* given, void* stream) {
  const fuseline_head_loss& call = *given;
  if (!fuseline_head_loss_takes(given)) return FUSELINE_UNSUPPORTED;
  HeadLoss a{};
  a.target = call.target, a.int32_targets = call.target_bytes == 4;
  a.parts = static_cast<float2*>(call.workspace);
  a.scores = reinterpret_cast<float*>(a.parts + divide_up(call.n, kHeadWide) * call.rows);
  a.rows = int(call.rows), a.n = int(call.n);
  const auto run = [&](auto zero) {
    return run_head<decltype(zero), HeadLossTile>(a, call.hidden, call.weight, call.rows, call.n, call.k, call.dtype, 0.0, stream);
  };
  const int error = call.dtype == FUSELINE_FLOAT16 ? run(__half{}) : run(__nv_bfloat16{});
  if (error != 0) return error;
  HeadCombine c{};
  c.parts = a.parts, c.scores = a.scores, c.target = call.target, c.weight = call.class_weight, c.loss = call.loss;
  c.ignore_index = call.ignore_index, c.rows = a.rows, c.n = a.n, c.z_loss = float(call.z_loss);
  c.tiles = a.tiles, c.int32_targets = a.int32_targets;
  return launch(combine_kernel, c, divide_up(call.rows, kCombineRows), dim3(kCombineRows * kCombineParts), 0, 1, stream);
}
