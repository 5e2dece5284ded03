// The forward of a norm of residual + dropout(x + x_bias): registers (add_norm_forward_held.cu, and with a mask or a bias of x
// add_norm_forward_masked.cu), bulk copies (add_norm_forward_copied.cu), else the kernel of add_norm_forward_ring.cu, and for
// rows that none takes those of norms/norm_forward_rows.cuh and norm_forward_long.cuh with a sum.
#include "norm_forward_launch.cuh"

namespace fuseline {
namespace {

constexpr int64_t kShortestCopied = 12288;  // elements: rows with a mask of which clusters' registers read less
constexpr int64_t kShortestCopied4 = 32768;  // the same of fp32: 0.981 and 0.979 of the copy bandwidth in place of 0.933, 0.947
constexpr int64_t kFewRows = 8;             // a multiprocessor, for which registers were measured

bool copies_come_first(const NormForward& a, int dtype, const Device& device) {
  const int64_t shortest = dtype == FUSELINE_FLOAT32 ? kShortestCopied4 : kShortestCopied;
  return a.dropout.seed && a.n >= shortest && a.rows > kFewRows * device.processors;
}

}  // namespace

int add_norm_forward(const NormForward& a, int dtype, int y_dtype, const Device& device, void* stream) {
  int error = 0;
  const bool same = dtype == y_dtype, copied_first = same && copies_come_first(a, dtype, device);
  if (same && add_norm_forward_held(a, dtype, device, stream, error)) return error;
  if (copied_first && add_norm_forward_copied(a, dtype, device, stream, error)) return error;
  if (same && add_norm_forward_masked(a, dtype, device, stream, error)) return error;
  if (same && !copied_first && add_norm_forward_copied(a, dtype, device, stream, error)) return error;
  if (!same && add_norm_forward_ring(a, y_dtype, device, stream, error)) return error;
  return with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    return run_forward<decltype(x), decltype(y), true>(a, device, stream);
  });
}

}  // namespace fuseline
