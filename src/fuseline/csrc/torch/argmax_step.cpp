// Writes the most likely token of each row of logits and adds 1 to the row's length, on CUDA; other devices run the
// reference in Python.
//
// Tokens and lengths are written, so that the op has no gradient and is for inference alone.


#include "fuseline_argmax_step.h"
#include "op.h"

namespace fuseline::argmax_step_op {
namespace {

constexpr const char* kName = "argmax_step";

void check_rows(const Tensor& x, const Tensor& logits, const char* name) {
    TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == logits.size(0) && x.is_contiguous() && x.scalar_type() == at::kLong &&
                          x.device() == logits.device(),
                      kName, ": ", name, " are ", x.scalar_type(), " of shape ", x.sizes(), " on ", x.device(),
                      "; they are int64, one a row, dense, on the logits' device.");
}

void argmax_step_cuda(const Tensor& logits, const Tensor& tokens, const Tensor& lengths) {
    TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) >= 1 && logits.size(1) <= FUSELINE_MOST_LOGITS &&
                          (logits.size(1) == 1 || logits.stride(1) == 1),
                      kName, ": logits have shape ", logits.sizes(), " and strides ", logits.strides(),
                      "; they are [B, V] with V from 1 to ", int64_t(FUSELINE_MOST_LOGITS), ", rows of unit stride.");
    check_rows(tokens, logits, "tokens");
    check_rows(lengths, logits, "lengths");
    const c10::DeviceGuard guard(logits.device());
    static const auto launch = FUSELINE_KERNEL(fuseline_argmax_step);
    check_launch(launch(logits.const_data_ptr(), tokens.mutable_data_ptr<int64_t>(), lengths.mutable_data_ptr<int64_t>(),
                        logits.size(0), logits.size(1), logits.stride(0), kernel_dtype(logits, kName),
                        current_stream(logits)),
                 kName);
}

void argmax_step_meta(const Tensor&, const Tensor&, const Tensor&) {}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "argmax_step(Tensor logits, Tensor(a!) tokens, Tensor(b!) lengths) -> ()",
                   argmax_step_cuda, argmax_step_meta);
}

}  // namespace fuseline::argmax_step_op
