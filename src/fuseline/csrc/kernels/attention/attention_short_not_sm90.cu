// Attention over short sequences and its gradients by products of warps, where there is no Hopper: of 65 to 128 rows or keys,
// for which Hopper has products of warpgroups, and in fp16, for which it has the general kernels (attention_short_forward.cuh,
// attention_short_backward.cuh).
#include "attention_short_backward.cuh"
#include "attention_short_forward.cuh"

namespace fuseline::short_attention {

template int forward_of<__half, 16>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int forward_of<__half, 32>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int forward_of<__half, 64>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int forward_of<__half, 128>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int forward_of<__nv_bfloat16, 128>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__half, 16>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__half, 32>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__half, 64>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__half, 128>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__nv_bfloat16, 128>(const ShortAttention& a, const AttentionPlan& plan, void* stream);

}  // namespace fuseline::short_attention
