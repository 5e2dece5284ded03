// Attention backward by products of warps: device/attention_backward.cuh.

#include "device/attention_backward.cuh"

namespace fuseline {

// attention_not_sm90.cu
extern template int launch_backward_tiles<__half, 64, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__half, 64, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__half, 128, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__half, 128, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__nv_bfloat16, 64, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__nv_bfloat16, 64, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__nv_bfloat16, 128, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
extern template int launch_backward_tiles<__nv_bfloat16, 128, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);

template int launch_backward<__half>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward<__nv_bfloat16>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward<float>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);

}  // namespace fuseline
