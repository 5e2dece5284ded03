// Attention over sequences of up to 128 rows and keys, in fp16, on Hopper (attention/attention_short_forward_wgmma.cuh).
#include "attention_short_forward_wgmma.cuh"

namespace fuseline::short_attention {

template int forward_by_warpgroups<__half>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
