// The C API of attention backward, and what its kernels need beforehand: delta, from which the sinks' gradient follows.

#include "device/attention_grad_mask.h"
#include "device/attention_launch.cuh"

namespace fuseline {

template <class T, bool kPlain>
int launch_backward(const AttentionBackward& g, void* stream);
// The same by products of warpgroups, of head dims to 128; FUSELINE_UNSUPPORTED if shared memory is too small.
template <class T, bool kPlain>
int launch_backward_panels(const AttentionBackward& g, const Device& device, void* stream);
// grad_q and grad_mask of some tiles of rows, of 64.
template <class T>
int launch_backward_leaving(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const LeftScores& left,
                            void* stream);

namespace {

constexpr int kDeltaThreads = 256, kLanesARow = 8;

struct Delta {
  Attention a;
  const void* grad_out;
  const float* grad_lse;
  float* delta;
  int64_t grad_out_strides[3];
};

// delta = dot(out, grad_out) - grad_lse, 8 lanes a row.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads) attention_delta(const __grid_constant__ Delta g, int64_t rows) {
  const fuseline_attention& c = g.a.call;
  constexpr int kWide = 16 / int(sizeof(T));
  const int64_t index = (int64_t(blockIdx.x) * kDeltaThreads + threadIdx.x) / kLanesARow;
  const int64_t at = min(index, rows - 1);
  const int64_t row = at % c.seqlen_q, head = at / c.seqlen_q % c.heads, batch = at / c.seqlen_q / c.heads;
  const auto start = [&](const void* x, const int64_t(&strides)[3]) {
    return static_cast<const T*>(x) + batch * strides[0] + head * strides[1] + row * strides[2];
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
  if (index < rows && threadIdx.x % kLanesARow == 0) {
    g.delta[index] = g.grad_lse != nullptr ? sum - g.grad_lse[index] : sum;
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
    sum -= expf(sink - c.lse[at]) * g.delta[at];
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

int64_t statistics_bytes(const fuseline_attention& c) {
  return divide_up(c.batch * c.heads * c.seqlen_q * int64_t(sizeof(float)), 16) * 16;
}

template <int kCount>
void copy_strides(int64_t (&to)[kCount], const int64_t (&from)[kCount]) {
  std::copy(from, from + kCount, to);
}

int launch_delta(const Delta& g, void* stream) {
  const int64_t rows = g.a.call.batch * g.a.call.heads * g.a.call.seqlen_q;
  const int64_t blocks = divide_up(rows * kLanesARow, kDeltaThreads);
  if (blocks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  const auto on = static_cast<cudaStream_t>(stream);
  return with_dtype(g.a.call.dtype, [&](auto zero) {
    attention_delta<decltype(zero)><<<unsigned(blocks), kDeltaThreads, 0, on>>>(g, rows);
    return int(cudaGetLastError());
  });
}

template <class T>
int launch_sums_of(const AttentionBackward& g, void* stream) {
  constexpr int kNarrow = 32;  // plain calls have narrow tiles for these heads
  const bool plain = plain_scores(g.a);
  const int64_t head_dim = g.a.call.head_dim;
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  if (device.warpgroups && head_dim <= 128 && !(plain && head_dim <= kNarrow)) {
    const int code = plain ? launch_backward_panels<T, true>(g, device, stream)
                           : launch_backward_panels<T, false>(g, device, stream);
    if (code != FUSELINE_UNSUPPORTED) return code;
  }
  return plain ? launch_backward<T, true>(g, stream) : launch_backward<T, false>(g, stream);
}

int launch_sums(const AttentionBackward& g, void* stream) {
  switch (g.a.call.dtype) {
    case FUSELINE_FLOAT16:
      return launch_sums_of<__half>(g, stream);
    case FUSELINE_BFLOAT16:
      return launch_sums_of<__nv_bfloat16>(g, stream);
    default:
      return launch_backward<float, false>(g, stream);
  }
}

// grad_q and the mask's gradient together, `tiles` tiles of rows at a time.
int launch_leaving(const AttentionBackward& g, const fuseline_attention_gradients& gradients, int64_t tiles, void* scratch,
                   void* stream) {
  const fuseline_attention& c = g.a.call;
  const int64_t all = divide_up(c.seqlen_q, 64);
  int code = 0;
  for (int64_t first = 0; code == 0 && first < all; first += tiles) {
    const LeftScores left{static_cast<uint4*>(scratch), int(first), int(std::min(tiles, all - first)), 0};
    code = c.dtype == FUSELINE_FLOAT16 ? launch_backward_leaving<__half>(g, gradients, left, stream)
                                       : launch_backward_leaving<__nv_bfloat16>(g, gradients, left, stream);
  }
  return code;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

size_t fuseline_attention_backward_workspace(const fuseline_attention_gradients* gradients) {
  return size_t(statistics_bytes(gradients->call)) + grad_mask_workspace(*gradients);
}

int fuseline_attention_backward(const fuseline_attention_gradients* gradients, void* stream) {
  const fuseline_attention& c = gradients->call;
  if (const int refusal = attention_refusal(c)) return refusal;
  const int size = c.dtype == FUSELINE_FLOAT32 ? 4 : 2;
  const auto fits = [&](const void* x, const int64_t(&strides)[3]) { return x == nullptr || in_vectors(x, strides, size); };
  if (!fits(c.q, c.q_strides) || !fits(c.k, c.k_strides) || !fits(c.v, c.v_strides) || !fits(c.out, c.out_strides) ||
      !fits(gradients->grad_out, gradients->grad_out_strides) || !fits(gradients->grad_q, gradients->grad_q_strides) ||
      !fits(gradients->grad_k, gradients->grad_k_strides) || !fits(gradients->grad_v, gradients->grad_v_strides)) {
    return FUSELINE_UNSUPPORTED;
  }
  if (c.batch == 0 || c.heads == 0) return 0;
  AttentionBackward g{};
  g.a = attention_of(c);
  g.grad_out = gradients->grad_out;
  g.grad_q = gradients->grad_q, g.grad_k = gradients->grad_k, g.grad_v = gradients->grad_v;
  copy_strides(g.grad_out_strides, gradients->grad_out_strides);
  copy_strides(g.grad_q_strides, gradients->grad_q_strides);
  copy_strides(g.grad_k_strides, gradients->grad_k_strides);
  copy_strides(g.grad_v_strides, gradients->grad_v_strides);
  float* const delta = static_cast<float*>(gradients->workspace);
  g.delta = delta;

  Delta of{};
  of.a = g.a, of.grad_out = g.grad_out, of.grad_lse = gradients->grad_lse, of.delta = delta;
  copy_strides(of.grad_out_strides, g.grad_out_strides);
  int code = c.seqlen_q > 0 ? launch_delta(of, stream) : 0;
  if (code == 0 && gradients->grad_sinks != nullptr) {
    attention_grad_sinks<<<unsigned(c.heads), kDeltaThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        of, gradients->grad_sinks);
    code = int(cudaGetLastError());
  }
  char* const scratch = static_cast<char*>(gradients->workspace) + statistics_bytes(c);
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  if (const int64_t tiles = left_tiles(*gradients, device); tiles > 0) {
    void* const grad_q = g.grad_q;
    g.grad_q = nullptr;
    if (code == 0) code = launch_sums(g, stream);
    g.grad_q = grad_q;
    return code != 0 ? code : launch_leaving(g, *gradients, tiles, scratch, stream);
  }
  if (code == 0) code = launch_sums(g, stream);
  if (code != 0 || gradients->grad_mask == nullptr) return code;
  return launch_grad_mask(g, *gradients, scratch, stream);
}
