// Attention backward for float16 on Hopper: device/attention_backward_single.cuh and device/attention_backward_wgmma.cuh.

#include "device/attention_backward_single.cuh"
#include "device/attention_backward_wgmma.cuh"

namespace fuseline {

template int launch_backward_panels<__half, true>(const AttentionBackward& g, const Device& device, void* stream);
template int launch_backward_panels<__half, false>(const AttentionBackward& g, const Device& device, void* stream);
template int launch_backward_single<__half>(const AttentionBackward& g, const SinglePassScratch& scratch, void* stream);
template int launch_backward_leaving<__half>(const AttentionBackward& g, const fuseline_attention_gradients& gradients,
                                          const LeftScores& left, void* stream);

}  // namespace fuseline
