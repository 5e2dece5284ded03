// Rows that are there as rows in fp8 (fp8_rows.cuh).

#include "fp8_rows.cuh"

int fuseline_to_fp8(const void* x, const float* columns, void* y, float* scales, int64_t rows, int64_t n, int64_t stride,
                    int dtype, int format, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0 || stride < 0 || n > (1 << 30)) return FUSELINE_BAD_SIZE;
  if (rows == 0) return 0;
  const int size = dtype == FUSELINE_FLOAT32 ? 4 : 2;
  if (n % kFp8Multiple || stride * size % 16) return FUSELINE_UNSUPPORTED;
  if (offset_in_vector(x) || offset_in_vector(y) || offset_in_vector(columns)) return FUSELINE_UNSUPPORTED;
  if (format != FUSELINE_E4M3 && format != FUSELINE_E5M2) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  Fp8Rows a{};
  a.in[0] = x, a.stride[0] = stride, a.columns = columns, a.narrow = static_cast<uint8_t*>(y), a.scales = scales;
  a.rows = rows, a.vectors = int(n / kFp8Vector), a.e5m2 = format == FUSELINE_E5M2;
  return with_dtype(dtype, [&](auto type) { return launch_fp8_rows<AsTheyAre, decltype(type)>(a, device, stream); });
}
