// The C API of attention backward, which launches what the plan says, and what its kernels need beforehand: delta, from which
// the sinks' gradient follows.

#include "attention_launches.h"
#include "device/attention_launch.cuh"

namespace fuseline {

template <class T>
int launch_backward(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
// The same by products of warpgroups, in 16 bits.
template <class T>
int launch_backward_panels(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
// All gradients in one pass.
int launch_backward_single(const AttentionBackward& g, const SinglePassScratch& scratch, const AttentionLaunch& by, void* stream);
// grad_q of some tiles of rows, in bf16, and what grad_mask is the sum of.
int launch_backward_leaving(const AttentionBackward& g, const LeftScores& left, const AttentionLaunch& by, void* stream);

namespace {

struct Delta {
  Attention a;
  const void* grad_out;
  const float* grad_lse;
  float *delta, *lse_log2;
  int64_t statistic_rows;
  int *turns, *key_turns;  // of the single pass, which has none done yet; null without it
  uint32_t* kept;          // of the single pass with dropout; null without it
  int64_t grad_out_strides[3];
};

// A word of KeptBits, from its first row's block of Philox.
__device__ __forceinline__ uint32_t draw_kept(const Dropout& dropout, uint64_t seed, uint64_t block, unsigned blocks_a_row) {
  uint32_t word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) word |= kept_of_block(dropout, seed, block + blocks_a_row * (b / 2 * 8 + b % 2)) << 8 * b;
  return word;
}

// delta = dot(out, grad_out) - grad_lse, 8 lanes a row; and lse_log2, which the kernels that follow copy as it is. A block's
// rows are of one head. For the single pass with dropout delta is divided by the scale of what is kept, and a block draws what
// is kept of its rows, beside the loads of others: the pass itself would draw a block of Philox for every two elements.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads) attention_delta(const __grid_constant__ Delta g) {
  const fuseline_attention& c = g.a.call;
  constexpr int kWide = 16 / int(sizeof(T));
  const unsigned blocks = unsigned(g.statistic_rows / kDeltaRows), index = blockIdx.x / blocks;  // of a head, and its number
  const unsigned heads = unsigned(c.heads), head = index % heads, batch = index / heads;
  const int64_t row = int64_t(blockIdx.x % blocks) * kDeltaRows + threadIdx.x / kLanesARow;
  const bool there = row < c.seqlen_q;
  const int64_t read = there ? row : 0, of_lse = int64_t(index) * c.seqlen_q + read;
  const float lse = c.lse[of_lse], grad_lse = g.grad_lse != nullptr ? g.grad_lse[of_lse] : 0.f;
  const auto start = [&](const void* x, const int64_t(&strides)[3]) {
    return static_cast<const T*>(x) + batch * strides[0] + head * strides[1] + read * strides[2];
  };
  const T* const out = start(c.out, c.out_strides);
  const T* const grad_out = start(g.grad_out, g.grad_out_strides);
  float sum = 0.f;
  for (int column = threadIdx.x % kLanesARow * kWide; column < c.head_dim; column += kLanesARow * kWide) {
    float x[kWide], y[kWide];
    load_reused<T>(out + column, x);
    load_reused<T>(grad_out + column, y);
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum = fmaf(x[i], y[i], sum);
  }
#pragma unroll
  for (int lane = 1; lane < kLanesARow; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (threadIdx.x % kLanesARow == 0) {
    const int64_t at = index * g.statistic_rows + row;
    const float by = g.kept == nullptr ? 1.f : 1.f / g.a.dropout.scale;
    g.delta[at] = there ? (sum - grad_lse) * by : 0.f;
    g.lse_log2[at] = there && lse != -kInfinity ? lse * kLog2E : kInfinity;  // no power of a score relative to it is infinite
    if (g.turns != nullptr && row % kStatisticRows == 0) g.turns[at / kStatisticRows] = g.key_turns[at / kStatisticRows] = 0;
  }
  if (g.kept == nullptr) return;
  using Bits = KeptBits;
  constexpr int kStrips = kDeltaRows / 16, kWords = kStrips * Bits::kStrip;  // of 64 keys
  const int first = int(blockIdx.x % blocks) * kDeltaRows, row_tile = first / Bits::kRows;
  const int all = int((c.seqlen_k + 63) / 64), seen = c.causal != FUSELINE_CAUSAL_NONE ? min(all, row_tile + 1) : all;
  const int64_t row_tiles = g.statistic_rows / Bits::kRows, key_tiles = (c.seqlen_k + Bits::kKeys - 1) / Bits::kKeys;
  uint32_t* const to =
      g.kept + (index * row_tiles + row_tile) * key_tiles * Bits::kWords + first % Bits::kRows / 16 * Bits::kStrip;
  const uint64_t seed = uint64_t(*g.a.dropout.seed);
  const unsigned blocks_a_row = unsigned(c.seqlen_k) / 8;
  const uint64_t of_first = (uint64_t(index) * unsigned(c.seqlen_q) + unsigned(first)) * blocks_a_row;
  for (int i = int(threadIdx.x); i < seen * kWords; i += kDeltaThreads) {
    const int half = i / kWords, strip = i % kWords / Bits::kStrip, word = i % Bits::kStrip;
    const uint64_t block = of_first + unsigned(strip * 16 + word % 4 * 2) * blocks_a_row + unsigned(half * 8 + word / 4);
    to[half * Bits::kHalf + strip * Bits::kStrip + word] = draw_kept(g.a.dropout, seed, block, blocks_a_row);
  }
}

// grad_sinks[h] = -sum over batches and rows of exp(sinks[h] - lse) * delta: a block a head.
__global__ void __launch_bounds__(kDeltaThreads)
    attention_grad_sinks(const __grid_constant__ Delta g, float* grad_sinks) {
  const fuseline_attention& c = g.a.call;
  const int64_t head = blockIdx.x;
  const float sink = c.sinks[head];
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < c.batch * c.seqlen_q; i += kDeltaThreads) {
    const int64_t at = (i / c.seqlen_q * c.heads + head) * c.seqlen_q + i % c.seqlen_q;
    sum -= expf(sink - c.lse[at]) * g.delta[at / c.seqlen_q * g.statistic_rows + i % c.seqlen_q];
  }
  __shared__ float sums[kDeltaThreads];
  sums[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll
  for (int half = kDeltaThreads / 2; half > 0; half /= 2) {
    if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) grad_sinks[head] = sink == -kInfinity ? 0.f : sums[0];
}

template <int kCount>
void copy_strides(int64_t (&to)[kCount], const int64_t (&from)[kCount]) {
  std::copy(from, from + kCount, to);
}

int launch_delta(const Delta& g, const LaunchShape& shape, void* stream) {
  return with_dtype(g.a.call.dtype, [&](auto zero) {
    return launch(attention_delta<decltype(zero)>, g, shape.grid, dim3(unsigned(shape.threads)), 0, 1, stream);
  });
}

SinglePassScratch scratch_at(char* start, const SinglePassBytes& bytes) {
  char *const bits = start + bytes.partial + bytes.key_partial, *const counts = bits + bytes.kept;
  return {reinterpret_cast<float*>(start), reinterpret_cast<float*>(start + bytes.partial), reinterpret_cast<int*>(counts),
          reinterpret_cast<int*>(counts + bytes.turns), bytes.kept > 0 ? reinterpret_cast<uint32_t*>(bits) : nullptr};
}

// grad_q and the mask's gradient together, some tiles of rows at a time, of which the last may be fewer.
int launch_leaving(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const AttentionPlan& plan,
                   AttentionLaunch by, AttentionLaunch sum, void* scratch, void* stream) {
  const fuseline_attention& c = g.a.call;
  const int64_t all = divide_up(c.seqlen_q, kLeftRows), rows = by.shape.grid / by.tiles, sums = sum.shape.grid / by.tiles;
  const int steps = int(divide_up(c.seqlen_k, backward_panels(by.width, false).step));
  int code = 0;
  for (int64_t first = 0; code == 0 && first < all; first += plan.left_tiles) {
    by.tiles = int(std::min(plan.left_tiles, all - first)), by.shape.grid = rows * by.tiles, sum.shape.grid = sums * by.tiles;
    const LeftScores left{static_cast<uint4*>(scratch), int(first), by.tiles, steps};
    code = launch_backward_leaving(g, left, by, stream);
    if (code == 0) code = launch_sum_left(g, gradients, left, sum, stream);
  }
  return code;
}

AttentionBackward backward_of(const fuseline_attention_gradients& gradients) {
  const fuseline_attention& c = gradients.call;
  AttentionBackward g{};
  g.a = attention_of(c);
  g.grad_out = gradients.grad_out;
  g.grad_q = gradients.grad_q, g.grad_k = gradients.grad_k, g.grad_v = gradients.grad_v;
  copy_strides(g.grad_out_strides, gradients.grad_out_strides);
  copy_strides(g.grad_q_strides, gradients.grad_q_strides);
  copy_strides(g.grad_k_strides, gradients.grad_k_strides);
  copy_strides(g.grad_v_strides, gradients.grad_v_strides);
  float* const statistics = static_cast<float*>(gradients.workspace);
  g.delta = statistics, g.lse_log2 = statistics + statistics_bytes(c) / int64_t(sizeof(float));
  g.statistic_rows = statistic_rows(c);
  return g;
}

int launch_plan(const fuseline_attention_gradients& gradients, const AttentionPlan& plan, void* stream) {
  const fuseline_attention& c = gradients.call;
  AttentionBackward g = backward_of(gradients);
  char* const scratch = static_cast<char*>(gradients.workspace) + 2 * statistics_bytes(c);
  SinglePassScratch of_single{};
  if (plan.launches[plan.count - 1].kernel == AttentionKernel::single) of_single = scratch_at(scratch, SinglePassBytes(c));
  Delta delta{g.a, g.grad_out, gradients.grad_lse, const_cast<float*>(g.delta), const_cast<float*>(g.lse_log2), g.statistic_rows,
              of_single.turns, of_single.key_turns, of_single.kept};
  copy_strides(delta.grad_out_strides, g.grad_out_strides);
  const auto run = [&](const AttentionLaunch& by) {
    g.a.mask_tile = by.mask_tile;
    switch (by.kernel) {
      case AttentionKernel::delta:
        return launch_delta(delta, by.shape, stream);
      case AttentionKernel::grad_sinks:
        attention_grad_sinks<<<unsigned(by.shape.grid), unsigned(by.shape.threads), 0, static_cast<cudaStream_t>(stream)>>>(
            delta, gradients.grad_sinks);
        return int(cudaGetLastError());
      case AttentionKernel::single:
        return launch_backward_single(g, of_single, by, stream);
      case AttentionKernel::rows_leaving:
        return launch_leaving(g, gradients, plan, by, *(&by + 1), scratch, stream);
      case AttentionKernel::sum_left:
        return 0;  // is launched with the tiles of rows that it sums
      case AttentionKernel::zeros:
      case AttentionKernel::grad_mask:
      case AttentionKernel::grad_mask_panels:
      case AttentionKernel::sum_pieces:
        return launch_grad_mask(g, gradients, plan, by, scratch, stream);
      case AttentionKernel::keys_panels:
      case AttentionKernel::rows_panels:
        return c.dtype == FUSELINE_FLOAT16 ? launch_backward_panels<__half>(g, by, stream)
                                           : launch_backward_panels<__nv_bfloat16>(g, by, stream);
      default:
        return with_dtype(c.dtype, [&](auto zero) { return launch_backward<decltype(zero)>(g, by, stream); });
    }
  };
  int code = 0;
  for (const AttentionLaunch& by : plan) code = code != 0 ? code : run(by);
  return code;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

size_t fuseline_attention_backward_workspace(const fuseline_attention_gradients* gradients) {
  Device device;
  return current_device(device) == cudaSuccess ? plan_attention_backward(*gradients, device).workspace : 0;
}

int fuseline_attention_backward(const fuseline_attention_gradients* gradients, void* stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const AttentionPlan plan = plan_attention_backward(*gradients, device);
  if (plan.count == 0) return plan.code;
  return plan.form.length > 0 ? launch_short_backward(*gradients, plan, stream) : launch_plan(*gradients, plan, stream);
}

int fuseline_attention_explain(const fuseline_attention_gradients* gradients, int backward, fuseline_attention_plan* plan) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const AttentionPlan found = backward ? plan_attention_backward(*gradients, device)
                                       : plan_attention_forward(gradients->call, device);
  *plan = {found.code, found.reason, found.workspace, found.count};
  for (int i = 0; i < found.count; ++i) {
    const AttentionLaunch& by = found.launches[i];
    plan->launches[i] = {name_of(by.kernel), by.shape.grid, by.shape.threads, by.shape.shared};
  }
  return 0;
}
