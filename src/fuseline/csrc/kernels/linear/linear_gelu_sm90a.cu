// A linear layer and GELU in one pass, and its gradient's. See device/linear_gelu.cuh.

#include "fuseline_linear_gelu.h"

#include "device/linear_gelu.cuh"

namespace fuseline {
namespace {

// Where they were measured to be faster than cuBLAS and our GELU (gelu.cu): 16,384 rows of 768 and 3,072 in bf16 on an H100,
// us: forward 138 and 181, of the error function 147; backward, with the bias's gradient, 192 and 230, of the error function
// 184. cuBLASLt's epilogues: GELU_AUX_BIAS 156, DGELU 147 without the bias's gradient, DGELU_BGRAD 459.
//
// On an H200 with GELU's slope, us, and torch's product and pass, which another day's run read:
//
//                                 forward, tanh / erf / torch's    backward / torch's
//   65,536 rows, 768 to 3,072                   529 / 551 / 815             518 / 904
//   16,384 rows, 1,600 to 6,400                 520 / 554 / 700             520 / 748
//
// Widths over 1,600 were not measured.
constexpr int64_t kLeastWidth = 768, kMostWidth = 1600;
constexpr int64_t kLeastTurns = 8;
constexpr double kFull = 0.85;  // of the time of the blocks that run at once

using T = __nv_bfloat16;

template <class Work>
int run(const fuseline_linear_gelu& call, void* stream) {
  LinearGelu a{};
  a.bias = call.bias, a.slope = call.slope, a.out = call.out, a.sums = call.sums;
  a.m = int(call.rows), a.n = int(call.inner);
  return run_linear_gelu<T, Work>(a, call.left, call.right, call.width, call.dtype, stream);
}

template <class Activation>
int forward(const fuseline_linear_gelu& call, void* stream) {
  return call.turned ? run<LinearGeluForward<T, Activation, true>>(call, stream)
                     : run<LinearGeluForward<T, Activation, false>>(call, stream);
}

// The backward takes more shared memory than the forward. A part of a device may have no room for its clusters.
bool has_room(const Device& device) {
  int clusters = 0;
  return resident_linear_gelu<T, LinearGeluBackward<T, false>>(device, clusters) == cudaSuccess && clusters > 0;
}

bool taken(const fuseline_linear_gelu& call) {
  return fuseline_linear_gelu_takes(call.rows, call.inner, call.width, call.width, call.dtype);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_linear_gelu_takes(int64_t rows, int64_t inner, int64_t width, int64_t out, int dtype) {
  constexpr int64_t kMost = 0x3fffffff;
  if (dtype != FUSELINE_BFLOAT16) return false;
  if (rows < 1 || rows > kMost || inner > kMost || inner % 8 != 0) return false;
  for (const int64_t multiplied : {width, out}) {
    if (multiplied < kLeastWidth || multiplied > kMostWidth || multiplied % 8 != 0) return false;
  }
  Device device;
  if (current_device(device) != cudaSuccess || !device.warpgroups || !has_room(device)) return false;
  const int64_t at_once = device.processors / kHeadCluster, tall = kHeadCluster * kHeadRows;
  const int64_t turns = divide_up(divide_up(rows, tall) * divide_up(inner, kHeadWide), at_once);
  return turns >= kLeastTurns && double(rows) * double(inner) >= kFull * double(turns * at_once * tall * kHeadWide);
}

int fuseline_linear_gelu_forward(const fuseline_linear_gelu* call, void* stream) {
  if (!taken(*call)) return FUSELINE_UNSUPPORTED;
  return call->approximate == FUSELINE_GELU_TANH ? forward<GeluTanh<T>>(*call, stream) : forward<GeluErf<T>>(*call, stream);
}

int fuseline_linear_gelu_backward(const fuseline_linear_gelu* call, void* stream) {
  if (!taken(*call)) return FUSELINE_UNSUPPORTED;
  return call->turned ? run<LinearGeluBackward<T, true>>(*call, stream) : run<LinearGeluBackward<T, false>>(*call, stream);
}
