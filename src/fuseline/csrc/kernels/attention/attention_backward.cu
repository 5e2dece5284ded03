// The C API of attention backward, and what its kernels need beforehand: delta, from which the sinks' gradient follows.

#include "device/attention_grad_mask.h"
#include "device/attention_launch.cuh"

namespace fuseline {

template <class T, bool kPlain>
int launch_backward(const AttentionBackward& g, void* stream);
// The same by products of warpgroups, of head dims to 128; FUSELINE_UNSUPPORTED if shared memory is too small.
template <class T, bool kPlain>
int launch_backward_panels(const AttentionBackward& g, const Device& device, void* stream);
// The same in one pass, for what `takes_single_pass` says; FUSELINE_UNSUPPORTED if the bulk copies do not take the tensors.
int launch_backward_single(const AttentionBackward& g, const SinglePassScratch& scratch, void* stream);
// grad_q and grad_mask of some tiles of rows, of 64, in bf16.
int launch_backward_leaving(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const LeftScores& left,
                            void* stream);

namespace {

constexpr int kDeltaThreads = 256, kLanesARow = 8, kDeltaRows = kDeltaThreads / kLanesARow, kStatisticRows = 64;
static_assert(kStatisticRows % kDeltaRows == 0);

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

int64_t statistic_rows(const fuseline_attention& c) { return divide_up(c.seqlen_q, kStatisticRows) * kStatisticRows; }

int64_t statistics_bytes(const fuseline_attention& c) {
  return c.batch * c.heads * statistic_rows(c) * int64_t(sizeof(float));
}

template <int kCount>
void copy_strides(int64_t (&to)[kCount], const int64_t (&from)[kCount]) {
  std::copy(from, from + kCount, to);
}

int launch_delta(const Delta& g, void* stream) {
  const int64_t blocks = g.a.call.batch * g.a.call.heads * (g.statistic_rows / kDeltaRows);
  if (blocks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  const auto on = static_cast<cudaStream_t>(stream);
  return with_dtype(g.a.call.dtype, [&](auto zero) {
    attention_delta<decltype(zero)><<<unsigned(blocks), kDeltaThreads, 0, on>>>(g);
    return int(cudaGetLastError());
  });
}

// Self-attention of plain scores in bf16 with all of its gradients, heads of 33 to 64, on Hopper. With dropout, rows of whole
// blocks of Philox, and no more of them than their sums of grad_q take as much room as the bits of what is kept; and something
// is kept, since what comes from grad_lse is divided by its scale.
bool takes_single_pass(const fuseline_attention_gradients& gradients) {
  const fuseline_attention& c = gradients.call;
  const bool shape = c.dtype == FUSELINE_BFLOAT16 && c.head_dim > 32 && c.head_dim <= 64 && c.seqlen_q == c.seqlen_k &&
                     c.cu_seqlens_q == nullptr && c.batch > 0 && c.kv_heads > 0 && c.seqlen_q > 0;
  const bool all = gradients.grad_q != nullptr && gradients.grad_k != nullptr && gradients.grad_v != nullptr;
  if (!shape || !all) return false;
  const Attention a = attention_of(c);
  const bool windows = a.left < kUnlimited || (c.causal == FUSELINE_CAUSAL_NONE && a.right < kUnlimited);
  constexpr int64_t kMostDropped = 2048;
  const bool drawn = c.seqlen_k % 8 == 0 && c.seqlen_k <= kMostDropped && c.dropout < 1 && gradients.grad_sinks == nullptr;
  if (a.dropout.seed != nullptr && !drawn) return false;
  Device device;
  return !windows && plain_but_for_dropout(a) && current_device(device) == cudaSuccess && device.warpgroups;
}

// The parts of what lies in the workspace for the single pass behind delta and lse_log2. There are as many turns of keys as of
// rows, which are more.
struct SinglePassBytes {
  int64_t partial, key_partial, turns, kept;
  explicit SinglePassBytes(const fuseline_attention& c) {
    constexpr int64_t kSums = 64 * int64_t(sizeof(float)), kKeys = 128;
    const int64_t rows = c.batch * c.heads * statistic_rows(c);
    partial = rows * kSums;
    key_partial = c.heads == c.kv_heads ? 0 : 2 * c.batch * c.kv_heads * divide_up(c.seqlen_k, kKeys) * kKeys * kSums;
    turns = rows / kStatisticRows * int64_t(sizeof(int));
    const int64_t tiles = rows / KeptBits::kRows * divide_up(c.seqlen_k, int64_t(KeptBits::kKeys));
    kept = c.dropout > 0 && c.seed != nullptr ? tiles * KeptBits::kBytes : 0;
  }
  int64_t all() const { return partial + key_partial + kept + 2 * turns; }
  SinglePassScratch at(char* start) const {
    char* const bits = start + partial + key_partial;
    char* const counts = bits + kept;
    return {reinterpret_cast<float*>(start), reinterpret_cast<float*>(start + partial), reinterpret_cast<int*>(counts),
            reinterpret_cast<int*>(counts + turns), kept > 0 ? reinterpret_cast<uint32_t*>(bits) : nullptr};
  }
};

template <class T>
int launch_sums_of(const AttentionBackward& g, void* stream) {
  const bool plain = takes_plain(g.a);
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  if (takes_panels(g.a, device)) {
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
    code = launch_backward_leaving(g, gradients, left, stream);
  }
  return code;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

size_t fuseline_attention_backward_workspace(const fuseline_attention_gradients* gradients) {
  const fuseline_attention& c = gradients->call;
  const size_t statistics = size_t(2 * statistics_bytes(c));
  if (!takes_single_pass(*gradients)) return statistics + grad_mask_workspace(*gradients);
  return statistics + size_t(SinglePassBytes(c).all());
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
  char* const workspace = static_cast<char*>(gradients->workspace);
  float* const delta = reinterpret_cast<float*>(workspace);
  float* const lse_log2 = reinterpret_cast<float*>(workspace + statistics_bytes(c));
  g.delta = delta, g.lse_log2 = lse_log2, g.statistic_rows = statistic_rows(c);

  Delta of{};
  of.a = g.a, of.grad_out = g.grad_out, of.grad_lse = gradients->grad_lse, of.delta = delta, of.lse_log2 = lse_log2;
  of.statistic_rows = g.statistic_rows;
  copy_strides(of.grad_out_strides, g.grad_out_strides);
  char* const scratch = workspace + 2 * statistics_bytes(c);
  const bool single = takes_single_pass(*gradients);
  const SinglePassScratch of_single = SinglePassBytes(c).at(scratch);
  if (single) of.turns = of_single.turns, of.key_turns = of_single.key_turns, of.kept = of_single.kept;
  int code = c.seqlen_q > 0 ? launch_delta(of, stream) : 0;
  if (code == 0 && gradients->grad_sinks != nullptr) {
    attention_grad_sinks<<<unsigned(c.heads), kDeltaThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        of, gradients->grad_sinks);
    code = int(cudaGetLastError());
  }
  if (code == 0 && single) {
    const int done = launch_backward_single(g, of_single, stream);
    if (done != FUSELINE_UNSUPPORTED) return done;
    if (of.kept != nullptr) {  // the other kernels' delta
      of.kept = nullptr;
      code = launch_delta(of, stream);
    }
  }
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
