// The forward of a norm of residual + dropout(x + x_bias), the residual in fp32 and x in 16 bits, for rows that come and leave in
// bulk copies (sm_90).
#include "norm_forward_added.cuh"

namespace fuseline {

bool add_norm_forward_ring(const NormForward& a, int y_dtype, const Device& device, void* stream, int& error) {
  return y_dtype == FUSELINE_FLOAT16 ? run_forward_added<float, __half>(a, device, stream, error)
                                     : run_forward_added<float, __nv_bfloat16>(a, device, stream, error);
}

}  // namespace fuseline
