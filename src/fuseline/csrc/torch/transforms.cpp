// The shared part of transforms.h, and the ops that have no gradient at all: they refuse tangents, and say in the
// backward pass who has none.

#include "transforms.h"

#include <torch/csrc/autograd/forward_grad.h>

namespace fuseline {

bool forward_mode_is_on() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

c10::OperatorHandle reference_of(const char* name) {
    const auto found = c10::Dispatcher::singleton().findSchema({std::string("fuseline::") + name + "_reference", ""});
    TORCH_CHECK_NOT_IMPLEMENTED(found.has_value(), "fuseline::", name, " has no forward-mode derivative and no rule for "
                                "torch.func (jvp, grad, vjp and what is made of them). Take torch.autograd.grad, or the "
                                "reference: fuseline.ops.get(...).reference takes the same arguments.");
    return *found;
}

namespace {

struct NoDerivative : torch::autograd::Function<NoDerivative> {
    static Tensor forward(AutogradContext* ctx, const Tensor& result, const Tensor&, const std::string& op) {
        ctx->saved_data["op"] = op;
        return result.view_as(result);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list&) {
        TORCH_CHECK_NOT_IMPLEMENTED(false, ctx->saved_data["op"].toStringRef(), " is for inference and has no gradient. "
                                    "Call it under torch.no_grad().");
        return {};
    }
};

// For ops of inference: what they return has no tangent, and no gradient.
void without_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t given = schema.arguments().size();
    const bool forward_mode = forward_mode_is_on();
    Tensor tracked;
    for (size_t i = 0; i < given; ++i) {
        const c10::IValue& value = torch::jit::peek(*stack, i, given);
        const auto look = [&](const Tensor& x) {
            TORCH_CHECK_NOT_IMPLEMENTED(!is_transformed(x, forward_mode), schema.name(), " is for inference: it has no "
                                        "forward-mode derivative and no rule for torch.func.");
            if (wants_grad(x)) tracked = x;
        };
        if (value.isTensor()) look(value.toTensor());
        if (value.isTensorList()) {
            for (const Tensor& x : value.toTensorVector()) look(x);
        }
    }
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        op.callBoxed(stack);
    }
    if (!at::GradMode::is_enabled() || !tracked.defined()) return;
    const size_t returned = schema.returns().size();
    for (size_t i = 0; i < returned; ++i) {
        c10::IValue& result = torch::jit::peek(*stack, i, returned);
        if (result.isTensor() && result.toTensor().is_floating_point()) {
            result = NoDerivative::apply(result.toTensor(), tracked, schema.name());
        }
    }
}

}  // namespace

TORCH_LIBRARY_IMPL(fuseline, Autograd, m) {
    for (const char* name :
         {"decode_attention", "decode_step", "fp8_activation", "fp8_activation_backward", "fp8_rows", "fp8_transpose",
          "fused_linear", "argmax_step", "adamw", "gradient_norm"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&without_derivative>());
    }
}

}  // namespace fuseline
