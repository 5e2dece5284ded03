// The loss of a linear head on GPUs that keep its logits to themselves (kernels/linear_cross_entropy_sm90a.cu).

#include <ATen/ops/empty.h>

#include "fuseline_linear_head.h"
#include "linear_head.h"

namespace fuseline::linear_head {

Tensor loss_without_logits(const Head& head, const Options& o) {
    const auto type = head.hidden.scalar_type();
    const bool plain = !head.bias.has_value() && o.label_smoothing == 0 && !o.soft_cap.has_value();
    if (!head.hidden.is_cuda() || !plain || head.rows == 0 || !(type == at::kHalf || type == at::kBFloat16)) return {};
    const int64_t words = head.weight.size(0), counted = o.columns(head.weight.t());
    const auto target_type = head.target.scalar_type();
    // What is wrong is told by the loss of logits.
    if (counted < 1 || counted > words || !(target_type == at::kLong || target_type == at::kInt)) return {};
    if (head.target.device() != head.hidden.device()) return {};
    if (head.class_weight.has_value()) {
        const Tensor& given = *head.class_weight;
        if (given.dim() != 1 || given.size(0) != counted || given.device() != head.hidden.device() ||
            !at::isFloatingType(given.scalar_type())) {
            return {};
        }
    }
    static const auto bytes = FUSELINE_KERNEL(fuseline_head_loss_workspace);
    static const auto launch = FUSELINE_KERNEL(fuseline_head_loss_forward);
    static const auto takes = FUSELINE_KERNEL(fuseline_head_loss_takes);
    fuseline_head_loss call{};
    call.rows = head.rows, call.n = counted, call.k = head.weight.size(1);
    call.dtype = kernel_dtype(head.hidden, kName);
    call.hidden = head.hidden.const_data_ptr(), call.weight = head.weight.const_data_ptr();
    const c10::DeviceGuard guard(head.hidden.device());
    if (!takes(&call)) return {};
    const auto options = head.hidden.options();
    const Tensor target = head.target.contiguous();
    const OptionalTensor weight =
        head.class_weight.has_value() ? OptionalTensor(head.class_weight->to(at::kFloat).contiguous()) : std::nullopt;
    const Tensor workspace =
        at::empty({static_cast<int64_t>(bytes(call.rows, call.n))}, options.dtype(at::kByte));
    const Tensor rows = at::empty({head.rows}, options.dtype(at::kFloat));
    call.target = target.const_data_ptr(), call.target_bytes = static_cast<int>(target.element_size());
    call.class_weight = weight.has_value() ? weight->const_data_ptr<float>() : nullptr;
    call.loss = rows.mutable_data_ptr<float>(), call.workspace = workspace.mutable_data_ptr();
    call.ignore_index = o.ignore_index, call.z_loss = o.z_loss;
    check_launch(launch(&call, current_stream(head.hidden)), kName);
    if (o.none()) return rows;
    static const auto reduce_bytes = FUSELINE_KERNEL(fuseline_cross_entropy_reduce_workspace);
    static const auto reduce = FUSELINE_KERNEL(fuseline_cross_entropy_reduce);
    const Tensor loss = at::empty({}, options.dtype(at::kFloat));
    const auto room = static_cast<int64_t>(reduce_bytes(head.rows));
    const Tensor sums = room > 0 ? at::empty({room}, options.dtype(at::kByte)) : Tensor();
    check_launch(reduce(rows.const_data_ptr<float>(), target.const_data_ptr(), call.target_bytes, call.class_weight,
                        loss.mutable_data_ptr<float>(), nullptr, room > 0 ? sums.mutable_data_ptr() : nullptr, head.rows,
                        call.n, o.ignore_index, o.mean(), current_stream(head.hidden)),
                 kName);
    return loss;
}

}  // namespace fuseline::linear_head
