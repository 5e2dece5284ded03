// The forward of norms whose rows come to shared memory in bulk copies (sm_90), for x of y's dtype: long rows, and short rows
// at odd addresses.
#include "norm_forward_copied.cuh"

namespace fuseline {

bool norm_forward_copied(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                         const RowChoice* requested) {
  bool taken = false;
  error = with_dtype(dtype, [&](auto type) {
    int failed = 0;
    taken = run_copied<decltype(type), false>(a, device, stream, failed, requested);
    return failed;
  });
  return taken || error;
}

}  // namespace fuseline
