// An LSTM cell as an operator of one's own, twice: in C++ over ATen (`fused` false), and with its pointwise half in
// the CUDA kernels of lstm_cell.cu (`fused` true). Forward and backward are written by hand.
//
//   [i f g o] = [x h] weight^T + bias,  c' = sigmoid(f) c + sigmoid(i) tanh(g),  h' = sigmoid(o) tanh(c')

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <c10/core/DeviceGuard.h>
#include <fuseline_extension.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

#ifdef FUSELINE_WITH_CUDA
extern "C" int example_lstm_forward(const float* gates, const float* c, float* h_next, float* c_next,
                                    float* activations, int64_t batch, int64_t width, void* stream);
extern "C" int example_lstm_backward(const float* grad_h, const float* grad_c_next, const float* activations,
                                     const float* c, const float* c_next, float* grad_gates, float* grad_c,
                                     int64_t batch, int64_t width, void* stream);
#endif

namespace {

void check(const Tensor& x, const Tensor& h, const Tensor& c, const Tensor& weight, const Tensor& bias) {
    TORCH_CHECK_VALUE(x.dim() == 2 && h.dim() == 2 && c.sym_sizes() == h.sym_sizes(),
                      "lstm_example: x is [batch, input], h and c are [batch, width]; got ", x.sym_sizes(), ", ",
                      h.sym_sizes(), " and ", c.sym_sizes());
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(0) == 4 * h.sym_size(1) &&
                          weight.sym_size(1) == x.sym_size(1) + h.sym_size(1) && bias.sym_numel() == weight.sym_size(0),
                      "lstm_example: weight is [4 * width, input + width] and bias [4 * width]; got ",
                      weight.sym_sizes(), " and ", bias.sym_sizes());
}

Three pointwise(const Tensor& gates, const Tensor& c) {
    const auto parts = gates.chunk(4, 1);
    const Tensor i = at::sigmoid(parts[0]), f = at::sigmoid(parts[1]), g = at::tanh(parts[2]), o = at::sigmoid(parts[3]);
    const Tensor c_next = f * c + i * g;
    return {o * at::tanh(c_next), c_next, at::cat({i, f, g, o}, 1)};
}

Two pointwise_backward(const Tensor& grad_h, const Tensor& grad_c_next, const Tensor& activations, const Tensor& c,
                       const Tensor& c_next) {
    const auto parts = activations.chunk(4, 1);
    const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
    const Tensor squashed = at::tanh(c_next);
    const Tensor through_c = grad_c_next + at::tanh_backward(grad_h * o, squashed);
    const Tensor grad_gates =
        at::cat({at::sigmoid_backward(through_c * g, i), at::sigmoid_backward(through_c * c, f),
                 at::tanh_backward(through_c * i, g), at::sigmoid_backward(grad_h * squashed, o)}, 1);
    return {grad_gates, through_c * f};
}

#ifdef FUSELINE_WITH_CUDA
void check_fused(const Tensor& c, int code) {
    TORCH_CHECK(code == 0, "lstm_example: the launch failed with CUDA error ", code, " for ", c.sizes());
}

Three fused_pointwise(const Tensor& gates, const Tensor& c) {
    TORCH_CHECK_TYPE(gates.scalar_type() == at::kFloat, "lstm_example's kernels take float32, not ",
                     gates.scalar_type());
    const c10::DeviceGuard guard(c.device());
    const Tensor in = c.contiguous();
    Tensor h_next = at::empty(c.sizes(), c.options()), c_next = at::empty(c.sizes(), c.options());
    Tensor activations = at::empty(gates.sizes(), gates.options());
    if (c.numel() > 0) {
        check_fused(c, example_lstm_forward(gates.const_data_ptr<float>(), in.const_data_ptr<float>(),
                                            h_next.mutable_data_ptr<float>(), c_next.mutable_data_ptr<float>(),
                                            activations.mutable_data_ptr<float>(), c.size(0), c.size(1),
                                            fuseline::current_stream(c)));
    }
    return {h_next, c_next, activations};
}

Two fused_pointwise_backward(const Tensor& grad_h, const Tensor& grad_c_next, const Tensor& activations,
                             const Tensor& c, const Tensor& c_next) {
    const c10::DeviceGuard guard(c.device());
    const Tensor gh = grad_h.contiguous(), gc = grad_c_next.contiguous(), in = c.contiguous();
    Tensor grad_gates = at::empty(activations.sizes(), activations.options());
    Tensor grad_c = at::empty(c.sizes(), c.options());
    if (c.numel() > 0) {
        check_fused(c, example_lstm_backward(gh.const_data_ptr<float>(), gc.const_data_ptr<float>(),
                                             activations.const_data_ptr<float>(), in.const_data_ptr<float>(),
                                             c_next.const_data_ptr<float>(), grad_gates.mutable_data_ptr<float>(),
                                             grad_c.mutable_data_ptr<float>(), c.size(0), c.size(1),
                                             fuseline::current_stream(c)));
    }
    return {grad_gates, grad_c};
}
#else
Three fused_pointwise(const Tensor&, const Tensor&) { TORCH_CHECK(false, "lstm_example was built without CUDA"); }
Two fused_pointwise_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
    TORCH_CHECK(false, "lstm_example was built without CUDA");
}
#endif

// h', c', and what backward needs: [x h] and the activated gates.
Four forward(const Tensor& x, const Tensor& h, const Tensor& c, const Tensor& weight, const Tensor& bias, bool fused) {
    check(x, h, c, weight, bias);
    const Tensor xh = at::cat({x, h}, 1);
    const Tensor gates = at::addmm(bias, xh, weight.t());
    auto [h_next, c_next, activations] = fused ? fused_pointwise(gates, c) : pointwise(gates, c);
    return {h_next, c_next, xh, activations};
}

Five backward(const Tensor& grad_h, const Tensor& grad_c_next, const Tensor& xh, const Tensor& activations,
              const Tensor& c, const Tensor& c_next, const Tensor& weight, bool fused) {
    const auto [grad_gates, grad_c] =
        fused ? fused_pointwise_backward(grad_h, grad_c_next, activations, c, c_next)
              : pointwise_backward(grad_h, grad_c_next, activations, c, c_next);
    const Tensor grad_xh = at::mm(grad_gates, weight);
    const int64_t inputs = xh.size(1) - c.size(1);
    // Copies: an operator does not return views of one tensor.
    return {grad_xh.narrow(1, 0, inputs).contiguous(), grad_xh.narrow(1, inputs, c.size(1)).contiguous(), grad_c,
            at::mm(grad_gates.t(), xh), grad_gates.sum(0)};
}

Two cell(const Tensor& x, const Tensor& h, const Tensor& c, const Tensor& weight, const Tensor& bias, bool fused) {
    auto [h_next, c_next, xh, activations] = forward(x, h, c, weight, bias, fused);
    return {h_next, c_next};
}

// Shapes alone, for the compiler.
Four forward_meta(const Tensor& x, const Tensor& h, const Tensor& c, const Tensor& weight, const Tensor& bias, bool) {
    check(x, h, c, weight, bias);
    const auto batch = h.sym_size(0), width = h.sym_size(1);
    return {at::empty_symint({batch, width}, h.options()), at::empty_symint({batch, width}, h.options()),
            at::empty_symint({batch, weight.sym_size(1)}, h.options()),
            at::empty_symint({batch, 4 * width}, h.options())};
}

Five backward_meta(const Tensor&, const Tensor&, const Tensor& xh, const Tensor&, const Tensor& c, const Tensor&,
                   const Tensor& weight, bool) {
    const auto batch = c.sym_size(0), width = c.sym_size(1);
    return {at::empty_symint({batch, xh.sym_size(1) - width}, c.options()),
            at::empty_symint({batch, width}, c.options()), at::empty_symint({batch, width}, c.options()),
            at::empty_symint(weight.sym_sizes(), weight.options()),
            at::empty_symint({4 * width}, weight.options())};
}

Two cell_meta(const Tensor& x, const Tensor& h, const Tensor& c, const Tensor& weight, const Tensor& bias, bool) {
    check(x, h, c, weight, bias);
    return {at::empty_symint(h.sym_sizes(), h.options()), at::empty_symint(h.sym_sizes(), h.options())};
}

struct Cell : torch::autograd::Function<Cell> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& h, const Tensor& c,
                                 const Tensor& weight, const Tensor& bias, bool fused) {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("lstm_example::forward", "")
                                   .typed<decltype(::forward)>();
        const at::AutoDispatchBelowADInplaceOrView guard;
        auto [h_next, c_next, xh, activations] = op.call(x, h, c, weight, bias, fused);
        ctx->save_for_backward({xh, activations, c, c_next, weight});
        ctx->saved_data["fused"] = fused;
        return {h_next, c_next};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("lstm_example::backward", "")
                                   .typed<decltype(::backward)>();
        const auto saved = ctx->get_saved_variables();
        auto [grad_x, grad_h, grad_c, grad_weight, grad_bias] =
            op.call(grads[0], grads[1], saved[0], saved[1], saved[2], saved[3], saved[4],
                    ctx->saved_data["fused"].toBool());
        return {grad_x, grad_h, grad_c, grad_weight, grad_bias, Tensor()};
    }
};

Two cell_autograd(const Tensor& x, const Tensor& h, const Tensor& c, const Tensor& weight, const Tensor& bias,
                  bool fused) {
    auto results = Cell::apply(x, h, c, weight, bias, fused);
    return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY(lstm_example, m) {
    m.def("cell(Tensor x, Tensor h, Tensor c, Tensor weight, Tensor bias, bool fused) -> (Tensor h, Tensor c)");
    m.def("forward(Tensor x, Tensor h, Tensor c, Tensor weight, Tensor bias, bool fused) "
          "-> (Tensor h, Tensor c, Tensor xh, Tensor activations)");
    m.def("backward(Tensor grad_h, Tensor grad_c, Tensor xh, Tensor activations, Tensor c, Tensor c_next, "
          "Tensor weight, bool fused) "
          "-> (Tensor grad_x, Tensor grad_h, Tensor grad_c, Tensor grad_weight, Tensor grad_bias)");
}

TORCH_LIBRARY_IMPL(lstm_example, CompositeExplicitAutograd, m) {
    m.impl("cell", cell);
    m.impl("forward", forward);
    m.impl("backward", backward);
}

TORCH_LIBRARY_IMPL(lstm_example, Meta, m) {
    m.impl("cell", cell_meta);
    m.impl("forward", forward_meta);
    m.impl("backward", backward_meta);
}

TORCH_LIBRARY_IMPL(lstm_example, Autograd, m) { m.impl("cell", cell_autograd); }
