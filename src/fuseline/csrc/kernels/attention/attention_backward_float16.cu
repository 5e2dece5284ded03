// Attention backward for float16: device/attention_backward.cuh.

#include "device/attention_backward.cuh"

namespace fuseline {

// attention_not_sm90.cu
extern template int launch_backward_tiles<__half, 64, true>(const AttentionBackward& g, void* stream);
extern template int launch_backward_tiles<__half, 64, false>(const AttentionBackward& g, void* stream);
extern template int launch_backward_tiles<__half, 128, true>(const AttentionBackward& g, void* stream);
extern template int launch_backward_tiles<__half, 128, false>(const AttentionBackward& g, void* stream);

template int launch_backward<__half, true>(const AttentionBackward& g, void* stream);
template int launch_backward<__half, false>(const AttentionBackward& g, void* stream);

}  // namespace fuseline
