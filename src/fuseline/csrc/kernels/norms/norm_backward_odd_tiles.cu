// The backward of all norms for many short rows at odd addresses: norms/norm_backward_tiled.cuh, with all the sums that any
// norm has.
#include "norm_backward_tiled.cuh"

namespace fuseline {

bool norm_backward_odd_tiles(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error) {
  if (a.rows <= kMostFewRows) return false;  // the general kernels take less: they have no sums to add up
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    using Tiles = TileFamily<decltype(x), decltype(y), kSumsOfAddedNorm, true, TileRows::kOdd>;
    return int(Tiles::run(a, device, stream, error));
  });
}

}  // namespace fuseline
