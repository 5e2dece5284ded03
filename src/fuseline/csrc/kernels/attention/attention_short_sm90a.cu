// Attention over sequences of up to 128 rows and keys and its gradients on Hopper: attention_short_forward_wgmma.cuh and
// attention_short_backward_wgmma.cuh.
#include "attention_short_backward_wgmma.cuh"
#include "attention_short_forward_wgmma.cuh"

namespace fuseline::short_attention {

int launch_by_warpgroups(const ShortAttention& a, const AttentionLaunch& by, void* stream) {
  const bool packed = a.starts_q != nullptr, forward = by.kernel == AttentionKernel::short_forward_warpgroups;
  return with_size<32, kWidest>(by.width, [&](auto width) {
    using T = __nv_bfloat16;
    const auto go = [&](auto* kernel) { return launch_problems(kernel, a, by, stream); };
    if (forward) return go(packed ? short_forward_warpgroups<T, width(), true> : short_forward_warpgroups<T, width(), false>);
    return go(packed ? short_backward_warpgroups<T, width(), true> : short_backward_warpgroups<T, width(), false>);
  });
}

}  // namespace fuseline::short_attention
