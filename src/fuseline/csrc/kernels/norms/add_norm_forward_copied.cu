// The forward of norms of residual + dropout(x + x_bias), whose rows come to shared memory in bulk copies (sm_90), for tensors of
// one dtype: long rows, and short rows at odd addresses.
#include "norm_forward_copied.cuh"

namespace fuseline {

bool add_norm_forward_copied(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                             const RowChoice* requested) {
  bool taken = false;
  error = with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    int failed = 0;
    taken = a.x_bias || a.dropout.seed ? run_copied<T, true, true>(a, device, stream, failed, requested)
                                       : run_copied<T, true>(a, device, stream, failed, requested);
    return failed;
  });
  return taken || error;
}

}  // namespace fuseline
