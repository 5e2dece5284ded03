// The forward of norms, of x or of residual + dropout(x + x_bias), for many long rows at any address:
// device/norm_forward_pieces.cuh. Shares of the copy bandwidth at 50,257 elements, of layer and RMS norms, by
// norm_forward_long.cuh and here: fp32 0.564 and 0.856, 0.700 and 0.872, of sums 0.805 and 0.891, 0.868 and 0.894, with a mask 0.747
// and 0.875, 0.834 and 0.865; 16 bits 0.649 and 0.609, 0.839 and 0.691, 0.782 and 0.809, 0.876 and 0.825, 0.665 and 0.526, 0.789 and
// 0.557, and at 262,143 of sums 0.547 and 0.788, 0.692 and 0.804, with a mask 0.445 and 0.543, 0.551 and 0.567. fp32 in bulk copies
// by blocks that end with their rows 0.777, 0.854, 0.827, 0.848, 0.779, 0.832.
#include "device/norm_forward_pieces.cuh"

namespace fuseline {
namespace {

// Of 9,001 elements layer norms of fp32 read 0.691 and, here, 0.675; of 20,001 0.680 and 0.883.
constexpr int64_t kShortestStaying = 16384, kLongestOfHalves = 131072;

bool takes(const NormForward& a, bool halves, bool masked) {
  if (a.n <= kShortestStaying) return false;
  return !halves || (a.residual && ((a.centred && !masked) || a.n > kLongestOfHalves));
}

}  // namespace

bool norm_forward_pieces(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                         const RowChoice* requested) {
  if (row_overrides[FUSELINE_LAYER_NORM_FORWARD].given) return false;
  if (!device.clusters || a.rows < device.processors || a.n > (int64_t(1) << 30)) return false;
  const bool masked = a.x_bias || a.dropout.seed;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (!requested && !takes(a, sizeof(T) == 2, masked)) return 0;
    bool aligned = a.n % kVector<T> == 0;
    for (const void* tensor : {a.x, a.residual, a.x_bias, a.weight, a.bias, static_cast<const void*>(a.y),
                               static_cast<const void*>(a.sum)}) {
      aligned = aligned && offset_in_vector(tensor) == 0;
    }
    if (aligned != (requested != nullptr)) return 0;
    if (!a.residual) {
      if constexpr (sizeof(T) == 4) return int(run_staying<T, false, false>(a, device, stream, error, requested));
      return 0;
    }
    return int(masked ? run_staying<T, true, true>(a, device, stream, error, requested)
                      : run_staying<T, true, false>(a, device, stream, error, requested));
  });
}

}  // namespace fuseline
