// The forward of norms for many rows at odd addresses: device/norm_forward_odd.cuh.
#include "device/norm_forward_odd.cuh"

#include "device/norm_odd.h"

namespace fuseline {

bool norm_forward_odd(const NormForward& a, const RowChoice& requested, void* workspace, int dtype, const Device& device,
                      void* stream, int& error) {
  if (!workspace || a.n > (int64_t(1) << 30)) return false;
  if (requested.kernel != RowKernel::copied && requested.kernel != RowKernel::light) return false;
  const bool masked = a.x_bias || a.dropout.seed;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (!a.residual) return int(run_odd<T, false, false>(a, requested, workspace, device, stream, error));
    return int(masked ? run_odd<T, true, true>(a, requested, workspace, device, stream, error)
                      : run_odd<T, true, false>(a, requested, workspace, device, stream, error));
  });
}

size_t norm_forward_odd_bytes(int64_t n, int dtype) {
  const int64_t vectors = dtype == FUSELINE_FLOAT32 ? kVector<float> * odd_vectors<float>(n)
                                                    : kVector<__half> * odd_vectors<__half>(n);
  return size_t(3 * vectors) * 16;
}

}  // namespace fuseline
