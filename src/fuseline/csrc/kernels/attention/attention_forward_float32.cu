// Attention forward for float32: device/attention_forward.cuh.

#include "device/attention_forward.cuh"

namespace fuseline {

template int launch_forward<float, false>(const Attention& a, void* stream);

}  // namespace fuseline
