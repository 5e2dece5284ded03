// Versions and error codes in words.

#include <cuda_runtime.h>

#include "fuseline_kernels.h"

int fuseline_kernels_abi_version(void) { return FUSELINE_KERNELS_ABI_VERSION; }

const char* fuseline_error_string(int code) {
  if (code == FUSELINE_UNSUPPORTED) return "a dtype, pair of dtypes or mask kind that the kernels do not know";
  if (code == FUSELINE_BAD_SIZE) return "a negative size";
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
