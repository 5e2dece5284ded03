// The products of a linear head where a kernel of ours is faster than cuBLAS (kernels/loss/head_product_sm90a.cu).

#include "fuseline_linear_head.h"
#include "linear_head.h"

namespace fuseline::linear_head {
namespace {

bool taken(int product, const Tensor& left, const Tensor& right, const Tensor& out, int64_t rows, int64_t words,
           int64_t width, const Tensor& factors = {}) {
    constexpr int64_t kLeast = 768;  // of each that a sum is over: fewer rows or columns are not worth asking about
    const auto type = left.scalar_type();
    if (!left.is_cuda() || rows < kLeast || words < kLeast || width < 8) return false;
    if (type != at::kBFloat16 || right.scalar_type() != type || out.scalar_type() != type) return false;
    if (!left.is_contiguous() || !right.is_contiguous() || !out.is_contiguous()) return false;
    static const auto launch = FUSELINE_KERNEL(fuseline_head_product_forward);
    const fuseline_head_product call{left.const_data_ptr(), right.const_data_ptr(), out.mutable_data_ptr(), rows, words, width,
                                     product, kernel_dtype(left, kName),
                                     factors.defined() ? factors.const_data_ptr<float>() : nullptr};
    const c10::DeviceGuard guard(left.device());
    const int status = launch(&call, current_stream(left));
    if (status == FUSELINE_UNSUPPORTED) return false;
    check_launch(status, kName);
    return true;
}

}  // namespace

bool multiply_logits(const Tensor& hidden, const Tensor& weight, const Tensor& out) {
    return taken(FUSELINE_HEAD_LOGITS, hidden, weight, out, hidden.size(0), weight.size(0), hidden.size(1));
}

bool multiply_grad_hidden(const Tensor& grad_logits, const Tensor& weight, const Tensor& out, const Tensor& factors) {
    return taken(FUSELINE_HEAD_GRAD_HIDDEN, grad_logits, weight, out, grad_logits.size(0), weight.size(0), weight.size(1),
                 factors);
}

bool multiply_grad_weight(const Tensor& grad_logits, const Tensor& hidden, const Tensor& out) {
    return taken(FUSELINE_HEAD_GRAD_WEIGHT, grad_logits, hidden, out, hidden.size(0), grad_logits.size(1), hidden.size(1));
}

}  // namespace fuseline::linear_head
