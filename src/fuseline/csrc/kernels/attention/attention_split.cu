// Attention of few query rows over many keys: how its work is cut. The kernels stand in attention/attention_split.cuh.

#include "attention_split.cuh"

#include "attention_split.h"

namespace fuseline {
namespace {

// One row of products of one warp if that holds all rows of a key head, else four.
int row_warps(const fuseline_attention& c) { return c.seqlen_q * (c.heads / c.kv_heads) <= 16 ? 1 : 4; }

Split lay_out(const fuseline_attention& c, int processors) {
  constexpr int64_t kFewestKeys = 256;  // of a block: less is not worth what its sums cost
  Split g{};
  const int warps = row_warps(c);
  g.rows = c.batch * c.heads * c.seqlen_q;
  g.chunks = int(divide_up(c.seqlen_q * (c.heads / c.kv_heads), 16 * warps));
  const int64_t blocks = g.chunks * c.kv_heads * c.batch, most = divide_up(c.seqlen_k, kFewestKeys);
  const int at_once = (c.head_dim <= 128 ? 2 : 1) * processors;
  g.splits = int(std::max<int64_t>(1, std::min<int64_t>({most, at_once / std::max<int64_t>(1, blocks), kMostSplits})));
  return g;
}

size_t sums_bytes(const Split& g, const fuseline_attention& c) { return size_t(g.splits) * g.rows * c.head_dim * 4; }

}  // namespace

size_t split_workspace(const fuseline_attention& c) {
  constexpr int64_t kMostRows = 16, kFewestKeys = 512;
  const bool fits = c.dtype != FUSELINE_FLOAT32 && c.cu_seqlens_q == nullptr && c.dropout == 0 && c.seqlen_q > 0 &&
                    c.seqlen_q <= kMostRows && c.seqlen_k >= kFewestKeys && c.batch > 0 && c.heads > 0;
  Device device;
  if (!fits || current_device(device) != cudaSuccess) return 0;
  const Split g = lay_out(c, device.processors);
  if (g.splits == 1) return 16;  // the only part is the result
  return sums_bytes(g, c) + size_t(g.splits) * g.rows * sizeof(float2);
}

int launch_split(const Attention& a, void* stream) {
  const fuseline_attention& c = a.call;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  Split g = lay_out(c, device.processors);
  g.a = a;
  g.sums = static_cast<float*>(c.workspace);
  g.totals = reinterpret_cast<float2*>(static_cast<char*>(c.workspace) + sums_bytes(g, c));
  const int warps = row_warps(c);
  return c.dtype == FUSELINE_FLOAT16 ? launch_split_parts<__half>(g, warps, stream)
                                     : launch_split_parts<__nv_bfloat16>(g, warps, stream);
}

}  // namespace fuseline
