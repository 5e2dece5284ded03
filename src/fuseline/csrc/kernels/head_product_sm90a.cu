// The products of a linear head: its logits, and the gradients of what they are made of. See device/head_product.cuh.

#include "fuseline_linear_head.h"

#include "device/head_product.cuh"

namespace fuseline {
namespace {

constexpr double kFull = 0.92;  // of the time of the blocks that run at once: below it other divisions of the work are faster

// out [m, n] = left right, over k.
template <class T, bool kTurnLeft, bool kTurnRight>
int run_product(const fuseline_head_product& call, int64_t m, int64_t n, int64_t k, void* stream) {
  HeadProduct a{};
  a.out = call.out, a.m = int(m), a.n = int(n);
  if (k < kHeadPieces * kHeadStep) return FUSELINE_UNSUPPORTED;
  return run_head<T, HeadProductTile<T, kTurnLeft, kTurnRight>>(a, call.left, call.right, m, n, k, call.dtype, kFull, stream);
}

template <class T>
int run_product_of(const fuseline_head_product& call, void* stream) {
  switch (call.product) {
    case FUSELINE_HEAD_LOGITS: return run_product<T, false, false>(call, call.rows, call.words, call.width, stream);
    case FUSELINE_HEAD_GRAD_HIDDEN: return run_product<T, false, true>(call, call.rows, call.width, call.words, stream);
    case FUSELINE_HEAD_GRAD_WEIGHT: return run_product<T, true, true>(call, call.words, call.width, call.rows, stream);
    default: return FUSELINE_UNSUPPORTED;
  }
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_head_product_forward(const fuseline_head_product* given, void* stream) {
  const fuseline_head_product& call = *given;
  constexpr int64_t kMost = 0x3fffffff;
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (call.rows > kMost || call.words > kMost || call.width > kMost) return FUSELINE_UNSUPPORTED;
  if (call.words % 8 != 0 || call.width % 8 != 0) return FUSELINE_UNSUPPORTED;
  if (!aligned(call.left) || !aligned(call.right) || !aligned(call.out)) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t found = current_device(device);
  if (found != cudaSuccess) return int(found);
  if (!device.warpgroups) return FUSELINE_UNSUPPORTED;
  return call.dtype == FUSELINE_FLOAT16    ? run_product_of<__half>(call, stream)
         : call.dtype == FUSELINE_BFLOAT16 ? run_product_of<__nv_bfloat16>(call, stream)
                                           : FUSELINE_UNSUPPORTED;
}
