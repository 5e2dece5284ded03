// Attention over sequences of up to 128 rows and keys on Hopper (attention_short_forward_wgmma.cuh).
#include "attention_short_forward_wgmma.cuh"

namespace fuseline::short_attention {

template int forward_by_warpgroups<__half>(const ShortAttention& a, const Device& device, void* stream);
template int forward_by_warpgroups<__nv_bfloat16>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
