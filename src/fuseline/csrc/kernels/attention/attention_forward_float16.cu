// Attention forward for float16: device/attention_forward.cuh.

#include "device/attention_forward.cuh"

namespace fuseline {

// attention_float16_not_sm90.cu
extern template int launch_forward_tiles<__half, 64, true>(const Attention& a, void* stream);
extern template int launch_forward_tiles<__half, 64, false>(const Attention& a, void* stream);
extern template int launch_forward_tiles<__half, 128, true>(const Attention& a, void* stream);

template int launch_forward<__half, true>(const Attention& a, void* stream);
template int launch_forward<__half, false>(const Attention& a, void* stream);

}  // namespace fuseline
