// Attention forward by products of warps: device/attention_forward.cuh.

#include "device/attention_forward.cuh"

namespace fuseline {

// attention_not_sm90.cu
extern template int launch_forward_tiles<__half, 64, true>(const Attention& a, const AttentionLaunch& by, void* stream);
extern template int launch_forward_tiles<__half, 64, false>(const Attention& a, const AttentionLaunch& by, void* stream);
extern template int launch_forward_tiles<__half, 128, true>(const Attention& a, const AttentionLaunch& by, void* stream);
extern template int launch_forward_tiles<__nv_bfloat16, 64, true>(const Attention& a, const AttentionLaunch& by, void* stream);
extern template int launch_forward_tiles<__nv_bfloat16, 64, false>(const Attention& a, const AttentionLaunch& by, void* stream);
extern template int launch_forward_tiles<__nv_bfloat16, 128, true>(const Attention& a, const AttentionLaunch& by, void* stream);

template int launch_forward<__half>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward<__nv_bfloat16>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward<float>(const Attention& a, const AttentionLaunch& by, void* stream);

}  // namespace fuseline
