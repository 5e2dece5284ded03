// Attention in 16 bits by products of warps, where Hopper has products of warpgroups: heads of 33 to 128, but for masks of fp32
// over heads of more than 64 forward, and the gradient of a mask for heads of up to 128.

#include "device/attention_backward.cuh"
#include "device/attention_forward.cuh"
#include "device/attention_grad_mask.cuh"

namespace fuseline {

template int launch_forward_tiles<__half, 64, true>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_tiles<__half, 64, false>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_tiles<__half, 128, true>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__half, 64, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__half, 64, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__half, 128, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__half, 128, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_forward_tiles<__nv_bfloat16, 64, true>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_tiles<__nv_bfloat16, 64, false>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_forward_tiles<__nv_bfloat16, 128, true>(const Attention& a, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__nv_bfloat16, 64, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__nv_bfloat16, 64, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__nv_bfloat16, 128, true>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_backward_tiles<__nv_bfloat16, 128, false>(const AttentionBackward& g, const AttentionLaunch& by, void* stream);
template int launch_grad_mask_tiles<__half, 64>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);
template int launch_grad_mask_tiles<__half, 128>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);
template int launch_grad_mask_tiles<__nv_bfloat16, 64>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);
template int launch_grad_mask_tiles<__nv_bfloat16, 128>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);

}  // namespace fuseline
