// Attention backward for bfloat16 on Hopper: device/attention_backward_single.cuh and device/attention_backward_wgmma.cuh.

#include "device/attention_backward_single.cuh"
#include "device/attention_backward_wgmma.cuh"

namespace fuseline {

template int launch_backward_panels<__nv_bfloat16, true>(const AttentionBackward& g, const Device& device, void* stream);
template int launch_backward_panels<__nv_bfloat16, false>(const AttentionBackward& g, const Device& device, void* stream);
template int launch_backward_single<__nv_bfloat16>(const AttentionBackward& g, const SinglePassScratch& scratch, void* stream);
template int launch_backward_leaving<__nv_bfloat16>(const AttentionBackward& g, const fuseline_attention_gradients& gradients,
                                          const LeftScores& left, void* stream);

}  // namespace fuseline
