// The gradient of an additive mask on Hopper: device/attention_grad_mask_wgmma.cuh.

#include "device/attention_grad_mask_wgmma.cuh"

namespace fuseline {

int launch_grad_mask_panels(const AttentionGradMask& of, int64_t blocks, void* stream) {
  using T = __nv_bfloat16;
  if (of.g.a.call.head_dim <= 64) return launch_grad_mask_kernel<T, GradMaskPanels<T, 64>>(of, blocks, stream);
  return launch_grad_mask_kernel<T, GradMaskPanels<T, 128>>(of, blocks, stream);
}

}  // namespace fuseline
