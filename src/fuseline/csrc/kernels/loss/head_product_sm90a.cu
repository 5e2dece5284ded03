// The products of a linear head: its logits, and the gradients of what they are made of. See loss/head_product.cuh.

#include "fuseline_linear_head.h"

#include "head_product.cuh"

namespace fuseline {
namespace {

constexpr double kFull = 0.92;  // of the time of the blocks that run at once: below it other divisions of the work are faster

// out [m, n] = left right, over k.
template <class T, bool kTurnLeft, bool kTurnRight>
int run_product(const fuseline_head_product& call, int64_t m, int64_t n, int64_t k, void* stream) {
  HeadProduct a{};
  a.out = call.out, a.factors = call.factors, a.m = int(m), a.n = int(n);
  if (k < kHeadPieces * kHeadStep) return FUSELINE_UNSUPPORTED;
  return run_head<T, HeadProductTile<T, kTurnLeft, kTurnRight>>(a, call.left, call.right, m, n, k, call.dtype, kFull, stream);
}

// The gradient's products are taken where they were measured to be faster than cuBLAS, which is of narrow heads in bf16: on
// an H100, us, ours and cuBLAS's, with 8,192 rows of 768 and 50,304 words dx 861 and 883, dW 886 and 876 (919 and 940 an
// hour before); 4,096 rows 487 and 495, 484 and 507; dW of 2,048 rows 228 and 241, of 1,024 rows 123 and 144. In fp16, 8,192
// rows: 888 and 872, 950 and 881. With 8,192 rows of 4,096 and 128,256 words 17,418 and 13,210, 19,940 and 13,406. Logits
// are faster at all of these, in fp16 too: 998 and 1,019 of 768, 12,822 and 13,191 of 4,096.
constexpr int64_t kNarrow = 1024;

int run_gradient(const fuseline_head_product& call, void* stream) {
  using T = __nv_bfloat16;
  if (call.dtype != FUSELINE_BFLOAT16 || call.width > kNarrow) return FUSELINE_UNSUPPORTED;
  return call.product == FUSELINE_HEAD_GRAD_HIDDEN
             ? run_product<T, false, true>(call, call.rows, call.width, call.words, stream)
             : run_product<T, true, true>(call, call.words, call.width, call.rows, stream);
}

int run_logits(const fuseline_head_product& call, void* stream) {
  if (call.dtype != FUSELINE_BFLOAT16) return FUSELINE_UNSUPPORTED;
  return run_product<__nv_bfloat16, false, false>(call, call.rows, call.words, call.width, stream);
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
  if (call.factors && call.product != FUSELINE_HEAD_GRAD_HIDDEN) return FUSELINE_UNSUPPORTED;
  if (!aligned(call.left) || !aligned(call.right) || !aligned(call.out)) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t found = current_device(device);
  if (found != cudaSuccess) return int(found);
  if (!device.warpgroups) return FUSELINE_UNSUPPORTED;
  switch (call.product) {
    case FUSELINE_HEAD_LOGITS: return run_logits(call, stream);
    case FUSELINE_HEAD_GRAD_HIDDEN:
    case FUSELINE_HEAD_GRAD_WEIGHT: return run_gradient(call, stream);
    default: return FUSELINE_UNSUPPORTED;
  }
}
