// Attention backward on Hopper: device/attention_backward_single.cuh and device/attention_backward_wgmma.cuh.

#include "device/attention_backward_single.cuh"
#include "device/attention_backward_wgmma.cuh"

namespace fuseline {

template int launch_backward_panels<__half>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_panels<__nv_bfloat16>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);

int launch_backward_leaving(const AttentionBackward& g, const LeftScores& left, const AttentionLaunch& by, void* stream) {
  using T = __nv_bfloat16;
  return launch_attention(by.width == 64 ? attention_backward_rows_panels<T, 64, false, true>
                                         : attention_backward_rows_panels<T, 128, false, true>,
                          BackwardRows{g, left}, by, stream);
}

int launch_backward_single(const AttentionBackward& given, const SinglePassScratch& scratch, const AttentionLaunch& by,
                           void* stream) {
  using Of = SinglePass;
  SinglePassBackward g{given, {}, {}, {}, {}, scratch, int(divide_up(given.a.call.seqlen_q, Of::kRows))};
  const fuseline_attention& c = g.a.call;
  const auto make = [&](CUtensorMap& map, const void* data, const int64_t(&strides)[3], int64_t heads, int64_t rows, int box) {
    return make_heads_map(map, data, strides, c.batch, heads, rows, c.head_dim, box, c.dtype);
  };
  int code = make(g.q, c.q, c.q_strides, c.heads, c.seqlen_q, Of::kRows);
  if (code == 0) code = make(g.k, c.k, c.k_strides, c.kv_heads, c.seqlen_k, Of::kKeys);
  if (code == 0) code = make(g.v, c.v, c.v_strides, c.kv_heads, c.seqlen_k, Of::kKeys);
  if (code == 0) code = make(g.from_out, g.grad_out, g.grad_out_strides, c.heads, c.seqlen_q, Of::kRows);
  if (code != 0) return code;
  return launch_attention(g.a.dropout.seed != nullptr ? attention_backward_single<__nv_bfloat16, true>
                                                      : attention_backward_single<__nv_bfloat16, false>,
                          g, by, stream);
}

}  // namespace fuseline
