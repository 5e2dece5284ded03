// The forward of norms for many long rows at odd addresses: device/norm_forward_odd.cuh.
#include "device/norm_forward_odd.cuh"

#include "device/norm_odd.h"

namespace fuseline {
namespace {

constexpr int64_t kShortestOdd = 8192;  // elements

template <class T>
bool keeps_to_vectors(const NormForward& a) {
  bool all = a.n % kVector<T> == 0;
  for (const void* tensor : {a.x, a.residual, a.x_bias, a.weight, a.bias, static_cast<const void*>(a.y),
                             static_cast<const void*>(a.sum)}) {
    all = all && offset_in_vector(tensor) == 0;
  }
  return all;
}

}  // namespace

bool norm_forward_odd(const NormForward& a, const RowChoice* choice, void* workspace, int dtype, int y_dtype,
                      const Device& device, void* stream, int& error) {
  if (!choice || !workspace || dtype != y_dtype || a.n < kShortestOdd || a.n > (int64_t(1) << 30)) return false;
  const bool masked = a.x_bias || a.dropout.seed;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (keeps_to_vectors<T>(a)) return 0;
    if (!a.residual) return int(run_odd<T, false, false>(a, *choice, workspace, device, stream, error));
    return int(masked ? run_odd<T, true, true>(a, *choice, workspace, device, stream, error)
                      : run_odd<T, true, false>(a, *choice, workspace, device, stream, error));
  });
}

size_t norm_forward_odd_bytes(const NormForward& a, int dtype) {
  if (a.n < kShortestOdd) return 0;
  const auto bytes = [&](auto type) {
    using T = decltype(type);
    return keeps_to_vectors<T>(a) ? 0 : size_t(3 * kVector<T> * odd_vectors<T>(a.n)) * 16;
  };
  return dtype == FUSELINE_FLOAT32 ? bytes(float{}) : bytes(__half{});
}

}  // namespace fuseline
