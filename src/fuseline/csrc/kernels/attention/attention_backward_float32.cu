// Attention backward for float32: device/attention_backward.cuh.

#include "device/attention_backward.cuh"

namespace fuseline {

template int launch_backward<float, false>(const AttentionBackward& g, void* stream);

}  // namespace fuseline
