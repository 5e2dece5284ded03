// The forward of norms, of x or of residual + dropout(x + x_bias), for rows that no cluster's shared memory holds: the last kernel
// of norms/norm_forward_long.cuh.
#include "norm_forward_launch.cuh"

namespace fuseline {

template <class X, class Y>
int streamed_forward(const NormForward& a, int threads, void* stream) {
  return launch(norm_forward_streamed<X, Y>, a, a.rows * a.cluster, dim3(unsigned(threads)), 0, a.cluster, stream);
}

template int streamed_forward<float, float>(const NormForward& a, int threads, void* stream);
template int streamed_forward<__half, __half>(const NormForward& a, int threads, void* stream);
template int streamed_forward<__nv_bfloat16, __nv_bfloat16>(const NormForward& a, int threads, void* stream);
template int streamed_forward<float, __half>(const NormForward& a, int threads, void* stream);
template int streamed_forward<float, __nv_bfloat16>(const NormForward& a, int threads, void* stream);

}  // namespace fuseline
