// Attention backward for bfloat16, with all that may happen to scores: device/attention_backward.cuh.

#include "device/attention_backward.cuh"

namespace fuseline {

template int launch_backward<__nv_bfloat16, false>(const AttentionBackward& g, void* stream);

}  // namespace fuseline
