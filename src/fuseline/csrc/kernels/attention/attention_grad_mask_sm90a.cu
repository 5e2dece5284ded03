// The gradient of an additive mask on Hopper: device/attention_grad_mask_wgmma.cuh.

#include "device/attention_grad_mask_wgmma.cuh"

namespace fuseline {

template int launch_grad_mask_panels<__half>(const AttentionGradMask& of, int64_t blocks, void* stream);
template int launch_grad_mask_panels<__nv_bfloat16>(const AttentionGradMask& of, int64_t blocks, void* stream);

}  // namespace fuseline
