// Gated linear units: activation(gate) * up, as `swiglu` and `geglu`, and their gradients.
//
// The two come as two tensors or as the halves of the last dimension of one, which is read, and its gradient written,
// without a copy. On the CPU it is put together from ATen's own kernels, in float32 (float64 for float64) and rounded
// once at the end.

#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <array>
#include <tuple>

#include "op.h"
#include "pieces.h"

namespace fuseline::glu_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;

// "silu", or the `approximate` of a gelu.
struct Activation {
    std::string name;

    bool silu() const { return name == "silu"; }
    const char* op() const { return silu() ? "swiglu" : "geglu"; }
    int code() const { return silu() ? FUSELINE_SILU : name == "tanh" ? FUSELINE_GELU_TANH : FUSELINE_GELU_ERF; }
    Tensor of(const Tensor& gate) const {
        const auto compute = [&](Tensor& out, const Tensor& in) {
            silu() ? at::silu_out(out, in) : at::gelu_out(out, in, name);
        };
        return in_pieces(compute, gate);
    }
    Tensor backward(const Tensor& grad, const Tensor& gate) const {
        const auto compute = [&](Tensor& out, const Tensor& g, const Tensor& in) {
            silu() ? at::silu_backward_out(out, g, in) : at::gelu_backward_out(out, g, in, name);
        };
        return in_pieces(compute, grad, gate);
    }
};

Tensor forward_op(const Tensor& x, const OptionalTensor& up, const Activation& activation) {
    constexpr Op<"swiglu", Tensor(const Tensor&, const OptionalTensor&)> swiglu_op;
    constexpr Op<"geglu", Tensor(const Tensor&, const OptionalTensor&, c10::string_view)> geglu_op;
    return activation.silu() ? swiglu_op(x, up) : geglu_op(x, up, activation.name);
}

Two backward_op(const Tensor& grad_out, const Tensor& x, const OptionalTensor& up, const Activation& activation,
                std::array<bool, 2> wanted) {
    constexpr Op<"glu_backward", Two(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view, std::array<bool, 2>)> op;
    return op(grad_out, x, up, activation.name, wanted);
}

void check(const Tensor& x, const OptionalTensor& up, const Activation& activation) {
    const char* op = activation.op();
    cpu_type(x, op);
    TORCH_CHECK_VALUE(activation.silu() || activation.name == "tanh" || activation.name == "none", op,
                      ": approximate is '", activation.name, "'; it is 'tanh' or 'none' (the error function).");
    if (!up.has_value()) {
        TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) % 2 == 0, op, ": without `up`, x holds the gate and it in the "
                          "halves of its last dimension, but x has shape ", x.sym_sizes(), ".");
        return;
    }
    check_same_shape(op, *up, "up", x, "the gate");
    check_device(op, *up, "up", x, "the gate");
    check_same_dtype(op, *up, "up", x, "the gate");
}

Tensor empty_output(const Tensor& x, const OptionalTensor& up) {
    if (up.has_value()) return at::empty_symint(x.sym_sizes(), x.options());
    auto sizes = x.sym_sizes().vec();
    sizes.back() = sizes.back() / 2;
    return at::empty_symint(sizes, x.options());
}

// The tensors as rows of n that stand `stride` apart; with no `up`, that is the second half of each row of x.
struct Halves {
    Tensor x, up;
    int64_t rows = 0, n, stride;

    Halves(const Tensor& given, const OptionalTensor& other) : x(given.contiguous()) {
        stride = x.dim() == 0 ? 1 : x.size(-1);
        n = other.has_value() ? stride : stride / 2;
        if (other.has_value()) up = other->contiguous();
        if (n > 0) rows = x.numel() / stride;
    }
    int64_t offset() const { return n * x.element_size(); }
    const void* gate_data() const { return x.const_data_ptr(); }
    const void* up_data() const {
        return up.defined() ? up.const_data_ptr() : static_cast<const char*>(x.const_data_ptr()) + offset();
    }
};

Tensor wide(const Tensor& t) { return t.to(accumulator_type(t.scalar_type())); }

std::array<Tensor, 2> wide_halves(const Tensor& x, const OptionalTensor& up) {
    if (up.has_value()) return {wide(x), wide(*up)};
    const int64_t n = x.size(-1) / 2;
    return {wide(x.narrow(-1, 0, n)), wide(x.narrow(-1, n, n))};
}

Tensor forward_cpu(const Tensor& x, const OptionalTensor& up, const Activation& activation) {
    check(x, up, activation);
    const auto [gate, other] = wide_halves(x, up);
    return activation.of(gate).mul(other).to(x.scalar_type()).contiguous();
}

Tensor forward_cuda(const Tensor& x, const OptionalTensor& up, const Activation& activation) {
    check(x, up, activation);
    const c10::DeviceGuard guard(x.device());
    const Halves halves(x, up);
    Tensor y = empty_output(x, up);
    static const auto launch = FUSELINE_KERNEL(fuseline_glu_forward);
    check_launch(launch(halves.gate_data(), halves.up_data(), y.data_ptr(), halves.rows, halves.n, halves.stride,
                        activation.code(), kernel_dtype(x, activation.op()), current_stream(x)),
                 activation.op());
    return y;
}

Tensor forward_meta(const Tensor& x, const OptionalTensor& up, const Activation& activation) {
    check(x, up, activation);
    return empty_output(x, up);
}

template <auto forward>
Tensor swiglu(const Tensor& x, const OptionalTensor& up) {
    return forward(x, up, Activation{"silu"});
}

template <auto forward>
Tensor geglu(const Tensor& x, const OptionalTensor& up, c10::string_view approximate) {
    return forward(x, up, Activation{std::string(approximate)});
}

Two backward_meta(const Tensor& grad_out, const Tensor& x, const OptionalTensor& up, c10::string_view,
                  std::array<bool, 2> wanted) {
    check_same_dtype("glu_backward", grad_out, "grad_out", x);
    Tensor grad_x, grad_up;
    if (wanted[0]) grad_x = at::empty_symint(x.sym_sizes(), x.options());
    if (wanted[1] && up.has_value()) grad_up = at::empty_symint(up->sym_sizes(), up->options());
    return {grad_x, grad_up};
}

Two backward_cpu(const Tensor& grad_out, const Tensor& x, const OptionalTensor& up, c10::string_view name,
                 std::array<bool, 2> wanted) {
    auto [grad_x, grad_up] = backward_meta(grad_out, x, up, name, wanted);
    const Activation activation{std::string(name)};
    const auto [gate, other] = wide_halves(x, up);
    const Tensor grad = wide(grad_out);
    const auto of_gate = [&] { return activation.backward(grad.mul(other), gate); };
    const auto of_up = [&] { return activation.of(gate).mul(grad); };
    if (up.has_value()) {
        if (grad_x.defined()) grad_x.copy_(of_gate());
        if (grad_up.defined()) grad_up.copy_(of_up());
    } else if (grad_x.defined()) {
        const int64_t n = x.size(-1) / 2;
        grad_x.narrow(-1, 0, n).copy_(of_gate());
        grad_x.narrow(-1, n, n).copy_(of_up());
    }
    return {grad_x, grad_up};
}

Two backward_cuda(const Tensor& grad_out, const Tensor& x, const OptionalTensor& up, c10::string_view name,
                  std::array<bool, 2> wanted) {
    auto [grad_x, grad_up] = backward_meta(grad_out, x, up, name, wanted);
    const Activation activation{std::string(name)};
    const c10::DeviceGuard guard(x.device());
    const Halves halves(x, up);
    const Tensor grad = grad_out.contiguous();
    void* grad_gate = grad_x.defined() ? grad_x.data_ptr() : nullptr;
    void* grad_other = grad_up.defined() ? grad_up.data_ptr() : nullptr;
    if (!up.has_value() && grad_gate != nullptr) grad_other = static_cast<char*>(grad_gate) + halves.offset();
    static const auto launch = FUSELINE_KERNEL(fuseline_glu_backward);
    check_launch(launch(grad.const_data_ptr(), halves.gate_data(), halves.up_data(), grad_gate, grad_other, halves.rows,
                        halves.n, halves.stride, halves.stride, activation.code(), kernel_dtype(x, activation.op()),
                        current_stream(x)),
                 activation.op());
    return {grad_x, grad_up};
}

struct Glu : torch::autograd::Function<Glu> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& up, const std::string& name) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        ctx->saved_data["activation"] = name;
        ctx->save_for_backward({x, up.value_or(Tensor())});
        return forward_op(x, up, Activation{name});
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const OptionalTensor up = optional(saved[1]);
        const std::array<bool, 2> wanted = {ctx->needs_input_grad(0), up.has_value() && ctx->needs_input_grad(1)};
        auto [grad_x, grad_up] =
            backward_op(grads[0], saved[0], up, Activation{ctx->saved_data["activation"].toStringRef()}, wanted);
        return {grad_x, grad_up, Tensor()};
    }
};

Tensor forward_autograd(const Tensor& x, const OptionalTensor& up, const Activation& activation) {
    if (tracked(x, up)) return Glu::apply(x, up, activation.name);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_op(x, up, activation);
}

Two backward_autograd(const Tensor& grad_out, const Tensor& x, const OptionalTensor& up, c10::string_view name,
                      std::array<bool, 2> wanted) {
    const Activation activation{std::string(name)};
    const Two made = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return backward_op(grad_out, x, up, activation, wanted);
    }();
    variable_list given;
    if (at::GradMode::is_enabled()) add_tracked(given, grad_out), add_tracked(given, x), add_tracked(given, up);
    return refused(made, given, activation.op());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "swiglu(Tensor x, Tensor? up=None) -> Tensor", swiglu<forward_cpu>, swiglu<forward_cuda>, swiglu<forward_meta>);
    define(m, "geglu(Tensor x, Tensor? up=None, str approximate=\"tanh\") -> Tensor",
           geglu<forward_cpu>, geglu<forward_cuda>, geglu<forward_meta>);
    define(m, "glu_backward(Tensor grad_out, Tensor x, Tensor? up, str activation, bool[2] wanted) "
              "-> (Tensor grad_x, Tensor grad_up)", backward_cpu, backward_cuda, backward_meta);
    differentiate<swiglu<forward_autograd>>(m, "swiglu");
    differentiate<geglu<forward_autograd>>(m, "geglu");
    differentiate<backward_autograd>(m, "glu_backward");
}

}  // namespace fuseline::glu_op
