// Attention over short sequences, as plans/attention.h has it: the kernels' arguments from a call, and their launches.
#include "attention_launches.h"
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

int launch_sum_groups(const ShortAttention& a, const ShortTensor& from, const ShortTensor& to, int dtype,
                      const AttentionPlan& plan, void* stream) {
  const LaunchShape& shape = plan.launches[1].shape;
  Groups g{};
  g.from = from.at, g.to = to;
  const bool packed = a.starts_k != nullptr;
  g.group = int(a.group.by), g.kv_heads = int(a.heads.by / a.group.by), g.head_dim = a.head_dim;
  g.rows = packed ? a.total_k : a.seqlen_k;
  g.vectors = int64_t((packed ? int(a.heads.by) : a.problems) / g.group) * g.rows * (g.head_dim / 8);
  const auto kernel = dtype == FUSELINE_FLOAT16 ? sum_groups<__half> : sum_groups<__nv_bfloat16>;
  return launch(kernel, g, shape.grid, dim3(unsigned(shape.threads)), 0, 1, stream);
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

Counter* counter_in(void* at, const AttentionPlan& plan) {
  return plan.form.counts && plan.form.counter > 0 ? static_cast<Counter*>(at) : nullptr;
}

}  // namespace
}  // namespace fuseline::short_attention

namespace fuseline {

int launch_short_forward(const fuseline_attention& call, const AttentionPlan& plan, void* stream) {
  using namespace short_attention;
  ShortAttention a = arguments(call);
  a.out = tensor(call.out, call.out_strides);
  if (a.starts_q != nullptr) a.out.batch = 0;
  a.lse = call.lse;
  a.counter = counter_in(call.workspace, plan);
  if (plan.form.warpgroups) return launch_by_warpgroups(a, plan.launches[0], stream);
  return with_size<16, kLongest>(plan.form.length, [&](auto length) {
    constexpr int kS = decltype(length)::value;
    return call.dtype == FUSELINE_FLOAT16 ? forward_of<__half, kS>(a, plan, stream)
                                          : forward_of<__nv_bfloat16, kS>(a, plan, stream);
  });
}

int launch_short_backward(const fuseline_attention_gradients& gradients, const AttentionPlan& plan, void* stream) {
  using namespace short_attention;
  const fuseline_attention& call = gradients.call;
  ShortAttention a = arguments(call);
  a.grad_out = tensor(gradients.grad_out, gradients.grad_out_strides);
  a.grad_q = tensor(gradients.grad_q, gradients.grad_q_strides);
  a.grad_k = tensor(gradients.grad_k, gradients.grad_k_strides);
  a.grad_v = tensor(gradients.grad_v, gradients.grad_v_strides);
  a.grad_lse = gradients.grad_lse;
  const size_t grouped = plan.form.grouped;
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
  a.counter = counter_in(scratch, plan);
  const auto by_warps = [&](auto length) {
    constexpr int kS = decltype(length)::value;
    return call.dtype == FUSELINE_FLOAT16 ? backward_of<__half, kS>(a, plan, stream)
                                          : backward_of<__nv_bfloat16, kS>(a, plan, stream);
  };
  int code = plan.form.warpgroups ? launch_by_warpgroups(a, plan.launches[0], stream)
                                  : with_size<16, kLongest>(plan.form.length, by_warps);
  if (grouped > 0 && code == 0 && grad_k.at) code = launch_sum_groups(a, a.grad_k, grad_k, call.dtype, plan, stream);
  if (grouped > 0 && code == 0 && grad_v.at) code = launch_sum_groups(a, a.grad_v, grad_v, call.dtype, plan, stream);
  return code;
}

}  // namespace fuseline
