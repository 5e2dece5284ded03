// Attention forward on Hopper: device/attention_forward_wgmma.cuh.

#include "device/attention_forward_wgmma.cuh"

namespace fuseline {

template int launch_forward_panels<__half, true>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_panels<__half, false>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_panels<__nv_bfloat16, true>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_panels<__nv_bfloat16, false>(const Attention& a, const AttentionLaunch& by, void* stream);

}  // namespace fuseline
