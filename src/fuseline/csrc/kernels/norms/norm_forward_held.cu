// The forward of norms whose rows keep to 16-byte steps and fit the registers of a block, or a cluster, for x of y's dtype.
#include "norm_forward_held_launch.cuh"

namespace fuseline {

bool norm_forward_held(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                       const RowChoice* requested) {
  bool taken = false;
  error = with_dtype(dtype, [&](auto type) {
    int failed = 0;
    taken = run_held<decltype(type), false>(a, device, stream, failed, requested);
    return failed;
  });
  return taken || error;
}

}  // namespace fuseline
