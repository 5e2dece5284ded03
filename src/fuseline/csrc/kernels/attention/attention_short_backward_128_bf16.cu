// The gradients of attention over sequences of up to 128 rows and keys, in bf16 (device/attention_short_backward.cuh).
#include "device/attention_short_backward.cuh"

namespace fuseline::short_attention {

template int backward_of<__nv_bfloat16, 128>(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
