// The gradients of attention over short sequences, in fp16 (device/attention_short_backward.cuh).
#include "device/attention_short_backward.cuh"

namespace fuseline::short_attention {

int attention_short_backward_fp16(const ShortAttention& a, const Device& device, void* stream) {
  return short_backward_of<__half>(a, device, stream);
}

}  // namespace fuseline::short_attention
