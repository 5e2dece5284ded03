// Attention over sequences of up to 128 rows and keys and its gradients on Hopper: attention_short_forward_wgmma.cuh and
// attention_short_backward_wgmma.cuh.
#include "attention_short_backward_wgmma.cuh"
#include "attention_short_forward_wgmma.cuh"

namespace fuseline::short_attention {

int forward_by_warpgroups(const ShortAttention& a, const Device& device, void* stream) {
  return with_head_dim(a.head_dim, [&](auto head_dim) {
    constexpr int kD = decltype(head_dim)::value;
    const auto kernel = a.starts_q ? short_forward_warpgroups<__nv_bfloat16, kD, true>
                                   : short_forward_warpgroups<__nv_bfloat16, kD, false>;
    return launch_warpgroups(kernel, a, kForwardBytes<kLongest, kD>, device, stream);
  });
}

int backward_by_warpgroups(const ShortAttention& a, const Device& device, void* stream) {
  return with_head_dim(a.head_dim, [&](auto head_dim) {
    constexpr int kD = decltype(head_dim)::value;
    const auto kernel = a.starts_q ? short_backward_warpgroups<__nv_bfloat16, kD, true>
                                   : short_backward_warpgroups<__nv_bfloat16, kD, false>;
    return launch_warpgroups(kernel, a, kBackwardBytes<kLongest, kD>, device, stream);
  });
}

}  // namespace fuseline::short_attention
