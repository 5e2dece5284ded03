// The gradients of attention over sequences of up to 64 rows and keys in bf16 (attention/attention_short_backward.cuh).
#include "attention_short_backward.cuh"

namespace fuseline::short_attention {

template int backward_of<__nv_bfloat16, 16>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__nv_bfloat16, 32>(const ShortAttention& a, const AttentionPlan& plan, void* stream);
template int backward_of<__nv_bfloat16, 64>(const ShortAttention& a, const AttentionPlan& plan, void* stream);

}  // namespace fuseline::short_attention
