// Attention over sequences of up to 128 rows and keys and its gradients on Hopper: attention_short_forward_wgmma.cuh and
// attention_short_backward_wgmma.cuh.
#include "attention_short_backward_wgmma.cuh"
#include "attention_short_forward_wgmma.cuh"

namespace fuseline::short_attention {

int forward_by_warpgroups(const ShortAttention& a, const AttentionLaunch& by, void* stream) {
  return with_size<32, 128>(by.width, [&](auto width) {
    constexpr int kD = decltype(width)::value;
    return launch_problems(a.starts_q ? short_forward_warpgroups<__nv_bfloat16, kD, true>
                                      : short_forward_warpgroups<__nv_bfloat16, kD, false>, a, by, stream);
  });
}

int backward_by_warpgroups(const ShortAttention& a, const AttentionLaunch& by, void* stream) {
  return with_size<32, 128>(by.width, [&](auto width) {
    constexpr int kD = decltype(width)::value;
    return launch_problems(a.starts_q ? short_backward_warpgroups<__nv_bfloat16, kD, true>
                                      : short_backward_warpgroups<__nv_bfloat16, kD, false>, a, by, stream);
  });
}

}  // namespace fuseline::short_attention
