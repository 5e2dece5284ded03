// Attention backward for bfloat16, plain calls: device/attention_backward.cuh.

#include "device/attention_backward.cuh"

namespace fuseline {

template int launch_backward<__nv_bfloat16, true>(const AttentionBackward& g, void* stream);

}  // namespace fuseline
