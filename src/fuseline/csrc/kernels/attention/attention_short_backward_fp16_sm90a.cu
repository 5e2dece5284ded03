// The gradients of attention over sequences of up to 128 rows and keys, in fp16, on Hopper
// (attention/attention_short_backward_wgmma.cuh).
#include "attention_short_backward_wgmma.cuh"

namespace fuseline::short_attention {

template int backward_by_warpgroups<__half>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
