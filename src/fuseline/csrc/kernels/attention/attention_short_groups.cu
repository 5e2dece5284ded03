// The gradients of a head of keys from those that attention_short_backward.cuh left of its query heads, as sums in one order.
//
// Moves: each of these read once, the sums written once. Limit: HBM bandwidth. A thread has one vector of a sum.

#include "attention_short_launch.cuh"

namespace fuseline::short_attention {
namespace {

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

}  // namespace

int launch_sum_groups(const ShortAttention& a, const ShortTensor& from, const ShortTensor& to, int dtype, void* stream) {
  Groups g{};
  g.from = from.at, g.to = to;
  const bool packed = a.starts_k != nullptr;
  g.group = int(a.group.by), g.kv_heads = int(a.heads.by / a.group.by), g.head_dim = a.head_dim;
  g.rows = packed ? a.total_k : a.seqlen_k;
  g.vectors = int64_t((packed ? int(a.heads.by) : a.problems) / g.group) * g.rows * (g.head_dim / 8);
  const int64_t blocks = divide_up(g.vectors, kThreads);
  if (blocks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == FUSELINE_FLOAT16) {
    sum_groups<__half><<<unsigned(blocks), kThreads, 0, on>>>(g);
  } else {
    sum_groups<__nv_bfloat16><<<unsigned(blocks), kThreads, 0, on>>>(g);
  }
  return int(cudaGetLastError());
}

}  // namespace fuseline::short_attention
