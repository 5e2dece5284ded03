// The gradients of attention over short sequences of up to 64 rows and keys, in fp16 (attention/attention_short_backward.cuh).
#include "attention_short_backward.cuh"

namespace fuseline::short_attention {

template int backward_of<__half, 16>(const ShortAttention& a, const Device& device, void* stream);
template int backward_of<__half, 32>(const ShortAttention& a, const Device& device, void* stream);
template int backward_of<__half, 64>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
