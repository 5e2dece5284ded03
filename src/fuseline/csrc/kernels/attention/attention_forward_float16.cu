// Attention forward for float16: device/attention_forward.cuh.

#include "device/attention_forward.cuh"

namespace fuseline {

template int launch_forward<__half, true>(const Attention& a, void* stream);
template int launch_forward<__half, false>(const Attention& a, void* stream);

}  // namespace fuseline
