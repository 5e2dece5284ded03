// The backward of norms for many rows at odd addresses: device/norm_backward_elements.cuh.
#include "device/norm_backward_elements.cuh"

#include "device/choice.h"

namespace fuseline {
namespace {

constexpr int64_t kLongestTile = 16;  // vectors of a row that norm_backward_tiled.cuh has
constexpr int64_t kLongestRow = 8192;  // elements

bool are_between(int64_t rows, int64_t n, int size) {
  return rows > kMostFewRows && n * size > kLongestTile * 16 && n <= kLongestRow;
}

}  // namespace

bool norm_backward_elements(const NormBackward& a, bool added, int dtype, int y_dtype, const Device& device, void* stream,
                            int& error) {
  if (dtype != y_dtype || !device.clusters || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) return false;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (!are_between(a.rows, a.n, sizeof(T)) || in_vectors<kVector<T>>(a)) return 0;
    if (added) return int(run_elements_backward<T, true, true>(a, device, stream, error));
    return int(a.mean ? run_elements_backward<T, true, false>(a, device, stream, error)
                      : run_elements_backward<T, false, false>(a, device, stream, error));
  });
}

int64_t norm_backward_elements_blocks(int64_t rows, int64_t n, bool added, const Device& device) {
  if (!are_between(rows, n, sizeof(float))) return 0;
  return std::max(elements_blocks<float>(rows, n, added, device), elements_blocks<__half>(rows, n, added, device));
}

}  // namespace fuseline
