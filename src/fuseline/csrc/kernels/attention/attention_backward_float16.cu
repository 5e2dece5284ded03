// Attention backward for float16, plain calls: device/attention_backward.cuh.

#include "device/attention_backward.cuh"

namespace fuseline {

template int launch_backward<__half, true>(const AttentionBackward& g, void* stream);

}  // namespace fuseline
