// The gradient of an additive mask on Hopper: device/attention_grad_mask_wgmma.cuh.

#include "device/attention_grad_mask_wgmma.cuh"

namespace fuseline {

int launch_grad_mask_panels(const AttentionGradMask& of, const AttentionLaunch& by, void* stream) {
  using T = __nv_bfloat16;
  return launch_attention(by.width == 64 ? attention_grad_mask<T, GradMaskPanels<T, 64>>
                                         : attention_grad_mask<T, GradMaskPanels<T, 128>>,
                          of, by, stream);
}

}  // namespace fuseline
