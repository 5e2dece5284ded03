// Attention over sequences of 65 to 128 rows or keys and its gradients by products of warps, where Hopper has products of
// warpgroups (attention_short_forward.cuh, attention_short_backward.cuh).
#include "attention_short_backward.cuh"
#include "attention_short_forward.cuh"

namespace fuseline::short_attention {

template int forward_of<__half, 128>(const ShortAttention& a, const Device& device, void* stream);
template int backward_of<__half, 128>(const ShortAttention& a, const Device& device, void* stream);
template int forward_of<__nv_bfloat16, 128>(const ShortAttention& a, const Device& device, void* stream);
template int backward_of<__nv_bfloat16, 128>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
