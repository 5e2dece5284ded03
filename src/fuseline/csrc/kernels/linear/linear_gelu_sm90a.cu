// A linear layer and GELU in one pass, and its gradient's. See device/linear_gelu.cuh.

#include "fuseline_linear_gelu.h"

#include "device/linear_gelu.cuh"

namespace fuseline {
namespace {

// Where they were measured to be faster than cuBLAS and our GELU (gelu.cu): 16,384 rows of 768 and 3,072 in bf16 on an H100,
// us: forward 138 and 181, of the error function 147; backward, with the bias's gradient, 192 and 230, of the error function
// 184. cuBLASLt's epilogues: GELU_AUX_BIAS 156, DGELU 147 without the bias's gradient, DGELU_BGRAD 459.
constexpr int64_t kLeastWidth = 768, kMostWidth = 1024;
constexpr int64_t kLeastTurns = 8;
constexpr double kFull = 0.85;  // of the time of the blocks that run at once

template <template <class, class> class Work>
int run_taken(const fuseline_linear_gelu& call, void* stream) {
  using T = __nv_bfloat16;
  if (!fuseline_linear_gelu_takes(call.rows, call.inner, call.width, call.dtype)) return FUSELINE_UNSUPPORTED;
  LinearGelu a{};
  a.bias = call.bias, a.kept = call.kept, a.out = call.out, a.sums = call.sums;
  a.m = int(call.rows), a.n = int(call.inner);
  const auto run = [&](auto activation) {
    return run_linear_gelu<T, Work<T, decltype(activation)>>(a, call.left, call.right, call.width, call.dtype, stream);
  };
  return call.approximate == FUSELINE_GELU_TANH ? run(GeluTanh<T>{}) : run(GeluErf<T>{});
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_linear_gelu_takes(int64_t rows, int64_t inner, int64_t width, int dtype) {
  constexpr int64_t kMost = 0x3fffffff;
  if (dtype != FUSELINE_BFLOAT16) return false;
  if (rows < 1 || rows > kMost || inner > kMost || width > kMost || inner % 8 != 0 || width % 8 != 0) return false;
  if (width < kLeastWidth || width > kMostWidth) return false;
  Device device;
  if (current_device(device) != cudaSuccess || !device.warpgroups) return false;
  const int64_t at_once = device.processors / kHeadCluster, tall = kHeadCluster * kHeadRows;
  const int64_t turns = divide_up(divide_up(rows, tall) * divide_up(inner, kHeadWide), at_once);
  return turns >= kLeastTurns && double(rows) * double(inner) >= kFull * double(turns * at_once * tall * kHeadWide);
}

int fuseline_linear_gelu_forward(const fuseline_linear_gelu* call, void* stream) {
  return run_taken<LinearGeluForward>(*call, stream);
}

int fuseline_linear_gelu_backward(const fuseline_linear_gelu* call, void* stream) {
  return run_taken<LinearGeluBackward>(*call, stream);
}
