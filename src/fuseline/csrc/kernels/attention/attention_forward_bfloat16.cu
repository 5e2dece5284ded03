// Attention forward for bfloat16: device/attention_forward.cuh.

#include "device/attention_forward.cuh"

namespace fuseline {

template int launch_forward<__nv_bfloat16, true>(const Attention& a, void* stream);
template int launch_forward<__nv_bfloat16, false>(const Attention& a, void* stream);

}  // namespace fuseline
