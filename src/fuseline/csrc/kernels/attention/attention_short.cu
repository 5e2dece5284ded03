// The C functions of attention over short sequences: they say which calls the kernels take, and start them.
#include "fuseline_attention_short.h"

#include <cstdlib>

#include "attention_short_wgmma.h"
#include "attention_short_launch.cuh"

namespace fuseline::short_attention {
namespace {

// The gradients of a head of keys from those of its query heads, which lie behind each other in `from`, as sums in one order.
// Moves: each of these read once, the sums written once. Limit: HBM bandwidth. A thread has one vector of a sum.
constexpr int kThreads = 256;

struct Groups {
  const void* from;   // [batch, kv_heads, group, rows, head_dim]
  ShortTensor to;     // [batch, kv_heads, rows, head_dim]
  int64_t vectors;    // of `to`
  int kv_heads, group, rows, head_dim;
};

template <class T>
__global__ void __launch_bounds__(kThreads) sum_groups(const __grid_constant__ Groups g) {
  constexpr int kWide = 8;
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= g.vectors) return;
  const int a_row = g.head_dim / kWide;
  const int column = int(at % a_row) * kWide;
  const int64_t line = at / a_row, head = line / g.rows;
  const int row = int(line % g.rows);
  const T* from = static_cast<const T*>(g.from) + (head * g.group * g.rows + row) * g.head_dim + column;
  float sums[kWide] = {};
#pragma unroll 4
  for (int i = 0; i < g.group; ++i) {
    const uint4 vector = __ldcs(reinterpret_cast<const uint4*>(from));
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack_pair<T>(words[w]);
      sums[2 * w] += pair.x, sums[2 * w + 1] += pair.y;
    }
    from += int64_t(g.rows) * g.head_dim;
  }
  uint4 sum;
  sum.x = pack_pair<T>(sums[0], sums[1]), sum.y = pack_pair<T>(sums[2], sums[3]);
  sum.z = pack_pair<T>(sums[4], sums[5]), sum.w = pack_pair<T>(sums[6], sums[7]);
  T* const to = static_cast<T*>(g.to.at) + head / g.kv_heads * g.to.batch + head % g.kv_heads * g.to.head +
                row * g.to.row + column;
  *reinterpret_cast<uint4*>(to) = sum;
}

int launch_sum_groups(const ShortAttention& a, const ShortTensor& from, const ShortTensor& to, int dtype, void* stream) {
  Groups g{};
  g.from = from.at, g.to = to;
  const bool packed = a.starts_k != nullptr;
  g.group = int(a.group.by), g.kv_heads = int(a.heads.by / a.group.by), g.head_dim = a.head_dim;
  g.rows = packed ? a.total_k : a.seqlen_k;
  g.vectors = int64_t((packed ? int(a.heads.by) : a.problems) / g.group) * g.rows * (g.head_dim / 8);
  const int64_t blocks = divide_up(g.vectors, kThreads);
  if (blocks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  const auto kernel = dtype == FUSELINE_FLOAT16 ? sum_groups<__half> : sum_groups<__nv_bfloat16>;
  kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(g);
  return int(cudaGetLastError());
}

constexpr int64_t kMostMaskStep = 1 << 20;  // elements from key to key
constexpr int64_t kMostProblems = int64_t(1) << 30;

// Whether a tensor's rows start at multiples of 16 bytes.
bool aligned(const void* at, const int64_t (&strides)[3]) {
  return offset_in_vector(at) == 0 && strides[0] % 8 == 0 && strides[1] % 8 == 0 && strides[2] % 8 == 0;
}

ShortTensor tensor(const void* at, const int64_t (&strides)[3]) {
  return {const_cast<void*>(at), strides[0], strides[1], strides[2]};
}

ShortAttention arguments(const fuseline_attention& call) {
  ShortAttention a{};
  a.q = tensor(call.q, call.q_strides);
  a.k = tensor(call.k, call.k_strides);
  a.v = tensor(call.v, call.v_strides);
  const bool packed = call.cu_seqlens_q != nullptr;
  a.problems = int((packed ? call.sequences : call.batch) * call.heads);
  a.heads = divisor_of(unsigned(call.heads)), a.group = divisor_of(unsigned(call.heads / call.kv_heads));
  a.seqlen_q = int(packed ? call.max_seqlen_q : call.seqlen_q);
  a.seqlen_k = int(packed ? call.max_seqlen_k : call.seqlen_k), a.head_dim = int(call.head_dim);
  if (packed) {
    a.starts_q = call.cu_seqlens_q, a.starts_k = call.cu_seqlens_k, a.sequences = int(call.sequences);
    a.total_q = int(call.seqlen_q), a.total_k = int(call.seqlen_k);
    a.bottom_right = call.causal == FUSELINE_CAUSAL_BOTTOM_RIGHT;
    a.q.batch = a.k.batch = a.v.batch = 0;  // sequences lie behind each other
  }
  a.scale = float(call.softmax_scale);
  a.dropout = dropout_of(call.seed, call.dropout);
  a.mask = call.mask, a.mask_kind = call.mask_kind;
  std::copy(call.mask_strides, call.mask_strides + 3, a.mask_strides);
  a.mask_step = int(call.mask_strides[3]);
  const int64_t shift = call.causal == FUSELINE_CAUSAL_BOTTOM_RIGHT && !packed ? call.seqlen_k - call.seqlen_q : 0;
  const int64_t right = call.causal == FUSELINE_CAUSAL_NONE ? call.window_right : 0;
  const auto reach = [](int64_t window) { return std::min<int64_t>(window < 0 ? 4 * kLongest : window, 4 * kLongest); };
  a.first = int(shift - reach(call.window_left)), a.last = int(shift + reach(right));
  a.bounded = call.window_left >= 0 || right >= 0;
  return a;
}

// Whether a block's bytes fit the device; there may be none.
bool has_room(const ShortAttention& a, bool backward) {
  Device device;
  if (current_device(device) != cudaSuccess) return false;
  return with_length(a, [&](auto length) {
    return with_head_dim(a.head_dim, [&](auto head_dim) {
      constexpr int kS = decltype(length)::value, kD = decltype(head_dim)::value;
      return int((backward ? kBackwardBytes<kS, kD> : kForwardBytes<kS, kD>) <= device.shared_a_block);
    });
  });
}

// On Hopper the general kernels have fp16.
bool takes(int dtype) {
  Device device;
  if (dtype != FUSELINE_FLOAT16) return dtype == FUSELINE_BFLOAT16;
  return current_device(device) == cudaSuccess && !device.warpgroups;
}

// Whether packed sequences are of a kind that these kernels take.
bool packs(const fuseline_attention& call) {
  constexpr int64_t kMostRows = int64_t(1) << 30;
  Device device;
  const bool both = call.cu_seqlens_q && call.cu_seqlens_k && call.batch == 1 && call.sequences >= 1;
  return both && call.mask_kind == FUSELINE_MASK_NONE && call.seqlen_q <= kMostRows && call.seqlen_k <= kMostRows &&
         current_device(device) == cudaSuccess &&
         (device.warpgroups || std::max(call.max_seqlen_q, call.max_seqlen_k) <= kPackedWarps);
}

bool fits(const fuseline_attention& call, bool backward) {
  const int64_t heads = call.heads, kv_heads = call.kv_heads;
  const bool packed = call.cu_seqlens_q || call.cu_seqlens_k;
  if (packed && !packs(call)) return false;
  const auto length = [](int64_t rows) { return rows >= 1 && rows <= kLongest; };
  const bool lengths = length(packed ? call.max_seqlen_q : call.seqlen_q) && length(packed ? call.max_seqlen_k : call.seqlen_k);
  const bool head_dim = call.head_dim >= 8 && call.head_dim <= kWidest && call.head_dim % 8 == 0;
  const bool problems = call.batch >= 1 && heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0 &&
                        (packed ? call.sequences : call.batch) <= kMostProblems / heads;
  const bool mask = call.mask_kind == FUSELINE_MASK_NONE ||
                    (call.mask_kind <= FUSELINE_MASK_ADD_FP32 && std::abs(call.mask_strides[3]) <= kMostMaskStep);
  const bool plain = call.soft_cap == 0 && !call.sinks;
  return takes(call.dtype) && lengths && head_dim && problems && mask && plain && call.softmax_scale > 0 &&
         has_room(arguments(call), backward);
}

// A counter of problems, where these are many to a block.
size_t counter_bytes(const fuseline_attention& call) {
  constexpr int64_t kFewTurns = 4, kRowsAtOnce = 256;  // of queries, on a multiprocessor
  Device device;
  if (current_device(device) != cudaSuccess) return 0;
  const ShortAttention a = arguments(call);
  const int64_t rows = int64_t(a.problems) * std::max(a.seqlen_q, a.seqlen_k);
  return rows >= kFewTurns * kRowsAtOnce * device.processors ? sizeof(Counter) : 0;
}

// One gradient like k for every query head, where several share a head of keys.
size_t grouped_bytes(const fuseline_attention& call) {
  return call.heads == call.kv_heads ? 0 : size_t(call.batch * call.heads * call.seqlen_k * call.head_dim) * 2;
}

size_t workspace(const fuseline_attention& call, bool backward) {
  return counter_bytes(call) + (backward ? 2 * grouped_bytes(call) : 0);
}

int forward(const fuseline_attention& call, void* stream) {
  if (!fits(call, false) || !aligned(call.q, call.q_strides) || !aligned(call.k, call.k_strides) ||
      !aligned(call.v, call.v_strides) || !aligned(call.out, call.out_strides)) {
    return FUSELINE_UNSUPPORTED;
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  ShortAttention a = arguments(call);
  a.out = tensor(call.out, call.out_strides);
  if (a.starts_q != nullptr) a.out.batch = 0;
  a.lse = call.lse;
  if (counter_bytes(call) > 0) a.counter = static_cast<Counter*>(call.workspace);
  if (is_longest(a)) {
    const int code = forward_by_warpgroups(a, device, stream);
    if (code != FUSELINE_UNSUPPORTED) return code;
  }
  return with_length(a, [&](auto length) {
    constexpr int kS = decltype(length)::value;
    return call.dtype == FUSELINE_FLOAT16 ? forward_of<__half, kS>(a, device, stream)
                                          : forward_of<__nv_bfloat16, kS>(a, device, stream);
  });
}

int backward(const fuseline_attention_gradients& gradients, void* stream) {
  const fuseline_attention& call = gradients.call;
  if (!fits(call, true) || gradients.grad_mask || gradients.grad_sinks || !aligned(call.q, call.q_strides) ||
      !aligned(call.k, call.k_strides) || !aligned(call.v, call.v_strides) ||
      !aligned(gradients.grad_out, gradients.grad_out_strides) || !aligned(gradients.grad_q, gradients.grad_q_strides) ||
      !aligned(gradients.grad_k, gradients.grad_k_strides) || !aligned(gradients.grad_v, gradients.grad_v_strides)) {
    return FUSELINE_UNSUPPORTED;
  }
  if (!gradients.grad_q && !gradients.grad_k && !gradients.grad_v) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  ShortAttention a = arguments(call);
  a.grad_out = tensor(gradients.grad_out, gradients.grad_out_strides);
  a.grad_q = tensor(gradients.grad_q, gradients.grad_q_strides);
  a.grad_k = tensor(gradients.grad_k, gradients.grad_k_strides);
  a.grad_v = tensor(gradients.grad_v, gradients.grad_v_strides);
  a.grad_lse = gradients.grad_lse;
  const size_t grouped = grouped_bytes(call);
  char* scratch = static_cast<char*>(gradients.workspace);
  if (scratch == nullptr && grouped > 0) return FUSELINE_UNSUPPORTED;
  const ShortTensor grad_k = a.grad_k, grad_v = a.grad_v;
  if (grouped > 0) {  // behind each other, and behind them the counter
    const int64_t row = call.head_dim, head = call.seqlen_k * row;
    if (grad_k.at) a.grad_k = {scratch, call.heads * head, head, row};
    if (grad_v.at) a.grad_v = {scratch + grouped, call.heads * head, head, row};
    scratch += 2 * grouped;
  }
  for (ShortTensor* tensor : {&a.grad_out, &a.grad_q, &a.grad_k, &a.grad_v}) {
    if (a.starts_q != nullptr) tensor->batch = 0;
  }
  if (counter_bytes(call) > 0) a.counter = reinterpret_cast<Counter*>(scratch);
  int code = FUSELINE_UNSUPPORTED;
  if (is_longest(a)) code = backward_by_warpgroups(a, device, stream);
  if (code == FUSELINE_UNSUPPORTED) {
    code = with_length(a, [&](auto length) {
      constexpr int kS = decltype(length)::value;
      return call.dtype == FUSELINE_FLOAT16 ? backward_of<__half, kS>(a, device, stream)
                                            : backward_of<__nv_bfloat16, kS>(a, device, stream);
    });
  }
  if (grouped > 0 && code == 0 && grad_k.at) code = launch_sum_groups(a, a.grad_k, grad_k, call.dtype, stream);
  if (grouped > 0 && code == 0 && grad_v.at) code = launch_sum_groups(a, a.grad_v, grad_v, call.dtype, stream);
  return code;
}

}  // namespace
}  // namespace fuseline::short_attention

int fuseline_attention_short_fits(const fuseline_attention* call, int backward) {
  return fuseline::short_attention::fits(*call, backward != 0);
}

size_t fuseline_attention_short_workspace(const fuseline_attention* call, int backward) {
  return fuseline::short_attention::workspace(*call, backward != 0);
}

int fuseline_attention_short_forward(const fuseline_attention* call, void* stream) {
  return fuseline::short_attention::forward(*call, stream);
}

int fuseline_attention_short_backward(const fuseline_attention_gradients* gradients, void* stream) {
  return fuseline::short_attention::backward(*gradients, stream);
}
