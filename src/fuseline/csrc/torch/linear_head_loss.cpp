// The loss of a linear head on GPUs that keep its logits to themselves (kernels/loss/linear_cross_entropy_sm90a.cu), or write
// their powers in their place, from which the gradients' products follow without another pass
// (kernels/loss/head_powers_sm90a.cu).

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "fuseline_linear_head.h"
#include "linear_head.h"

namespace fuseline::linear_head {
namespace {

// A head and its loss as the kernels take them: without bias, smoothing or cap.
struct Plain {
    const Head& head;
    const Options& o;
    int64_t counted;  // words
    Tensor target;
    OptionalTensor weight;  // of each word

    // None where kernels do not take it. What is wrong is told by the loss of logits.
    static std::optional<Plain> of(const Head& head, const Options& o) {
        const bool plain = !head.bias.has_value() && o.label_smoothing == 0 && !o.soft_cap.has_value();
        if (!head.hidden.is_cuda() || !plain || head.rows == 0) return {};
        const int64_t counted = head.counted(o);
        const auto target_type = head.target.scalar_type();
        if (counted < 1 || counted > head.words || !(target_type == at::kLong || target_type == at::kInt)) return {};
        if (head.target.device() != head.hidden.device()) return {};
        if (head.class_weight.has_value()) {
            const Tensor& given = *head.class_weight;
            if (given.dim() != 1 || given.size(0) != counted || given.device() != head.hidden.device() ||
                !at::isFloatingType(given.scalar_type())) {
                return {};
            }
        }
        return Plain{head, o, counted, head.target.contiguous(),
                     head.class_weight.has_value() ? OptionalTensor(head.class_weight->to(at::kFloat).contiguous())
                                                   : std::nullopt};
    }

    int target_bytes() const { return static_cast<int>(target.element_size()); }
    const float* weights() const { return weight.has_value() ? weight->const_data_ptr<float>() : nullptr; }

    Tensor room(size_t bytes) const {
        return at::empty({static_cast<int64_t>(bytes)}, head.hidden.options().dtype(at::kByte));
    }

    // The sum of the rows' losses, divided by `divisor` if it is their mean; without `rows` that divisor.
    Tensor reduced(const Tensor& rows) const {
        static const auto bytes = FUSELINE_KERNEL(fuseline_cross_entropy_reduce_workspace);
        static const auto reduce = FUSELINE_KERNEL(fuseline_cross_entropy_reduce);
        const Tensor result = at::empty({}, head.hidden.options().dtype(at::kFloat)), scratch = room(bytes(head.rows));
        float* const to = result.mutable_data_ptr<float>();
        const float* const from = rows.defined() ? rows.const_data_ptr<float>() : nullptr;
        check_launch(reduce(from, target.const_data_ptr(), target_bytes(), weights(), from ? to : nullptr,
                            from ? nullptr : to, scratch.mutable_data_ptr(), head.rows, counted, o.ignore_index, o.mean(),
                            current_stream(head.hidden)),
                     kName);
        return result;
    }
};

}  // namespace

Tensor loss_without_logits(const Head& head, const Options& o) {
    const auto type = head.hidden.scalar_type();
    const auto plain = Plain::of(head, o);
    if (!plain.has_value() || !(type == at::kHalf || type == at::kBFloat16)) return {};
    static const auto bytes = FUSELINE_KERNEL(fuseline_head_loss_workspace);
    static const auto launch = FUSELINE_KERNEL(fuseline_head_loss_forward);
    static const auto takes = FUSELINE_KERNEL(fuseline_head_loss_takes);
    fuseline_head_loss call{};
    call.rows = head.rows, call.n = plain->counted, call.k = head.weight.size(1);
    call.dtype = kernel_dtype(head.hidden, kName);
    call.hidden = head.hidden.const_data_ptr(), call.weight = head.weight.const_data_ptr();
    const c10::DeviceGuard guard(head.hidden.device());
    if (!takes(&call)) return {};
    const Tensor workspace = plain->room(bytes(call.rows, call.n));
    const Tensor rows = at::empty({head.rows}, head.hidden.options().dtype(at::kFloat));
    call.target = plain->target.const_data_ptr(), call.target_bytes = plain->target_bytes();
    call.class_weight = plain->weights();
    call.loss = rows.mutable_data_ptr<float>(), call.workspace = workspace.mutable_data_ptr();
    call.ignore_index = o.ignore_index, call.z_loss = o.z_loss;
    check_launch(launch(&call, current_stream(head.hidden)), kName);
    return o.none() ? rows : plain->reduced(rows);
}

Tensor loss_by_powers(const Head& head, const Options& o, Gradients& gradients) {
    const auto plain = Plain::of(head, o);
    if (!plain.has_value() || head.hidden.scalar_type() != at::kBFloat16) return {};
    static const auto bytes = FUSELINE_KERNEL(fuseline_head_powers_workspace);
    static const auto launch = FUSELINE_KERNEL(fuseline_head_powers_forward);
    static const auto takes = FUSELINE_KERNEL(fuseline_head_powers_takes);
    fuseline_head_powers call{};
    call.rows = head.rows - (head.rows - 1) / head.each * head.each;  // of the last chunk, which has the fewest
    call.words = head.width, call.n = plain->counted, call.k = head.weight.size(1);
    call.hidden = head.hidden.const_data_ptr(), call.weight = head.weight.const_data_ptr();
    const c10::DeviceGuard guard(head.hidden.device());
    if (!takes(&call)) return {};
    const auto options = head.hidden.options().dtype(at::kFloat);
    const Tensor divisor = o.mean() ? plain->reduced({}) : Tensor();
    const Tensor losses = at::empty({head.rows}, options);
    const Tensor workspace = plain->room(bytes(std::min(head.each, head.rows), call.words));
    call.target_bytes = plain->target_bytes(), call.class_weight = plain->weights();
    call.divisor = divisor.defined() ? divisor.const_data_ptr<float>() : nullptr;
    call.workspace = workspace.mutable_data_ptr();
    call.ignore_index = o.ignore_index, call.z_loss = o.z_loss;
    head.each_chunk([&](int64_t begin, int64_t length) {
        const Tensor hidden = head.hidden.narrow(0, begin, length);
        ChunkGradient chunk{at::empty({length, call.words}, hidden.options()),
                            gradients.wanted[1] ? at::empty_like(hidden) : Tensor(), at::empty({length}, options)};
        call.rows = length, call.hidden = hidden.const_data_ptr();
        call.target = plain->target.narrow(0, begin, length).const_data_ptr();
        call.powers = chunk.logits.mutable_data_ptr();
        call.scaled = gradients.wanted[1] ? chunk.hidden.mutable_data_ptr() : nullptr;
        call.factors = chunk.factors.mutable_data_ptr<float>();
        call.loss = losses.mutable_data_ptr<float>() + begin;
        check_launch(launch(&call, current_stream(hidden)), kName);
        gradients.add(chunk, begin);
    });
    return plain->reduced(losses);
}

}  // namespace fuseline::linear_head
