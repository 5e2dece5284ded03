// Attention over short sequences, in fp16 (device/attention_short_forward.cuh).
#include "device/attention_short_forward.cuh"

namespace fuseline::short_attention {

template int forward_of<__half>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
