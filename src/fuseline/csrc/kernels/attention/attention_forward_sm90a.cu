// Attention forward on Hopper: device/attention_forward_wgmma.cuh.

#include "device/attention_forward_wgmma.cuh"

namespace fuseline {

template int launch_forward_panels<__half>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_panels<__nv_bfloat16>(const Attention& a, const AttentionLaunch& by, void* stream);

}  // namespace fuseline
