// Layer normalization over the trailing dimensions, and its gradients.
//
// `layer_norm` is what callers call. Where a gradient will be wanted it runs `layer_norm_forward`, which also returns
// the rows' mean and rstd for `layer_norm_backward`; elsewhere the statistics are not written.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "fuseline_torch.h"

namespace fuseline {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Shape = c10::SymIntArrayRef;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kName = "layer_norm";

Tensor layer_norm_op(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias,
                     double eps) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::layer_norm", "").typed<
        Tensor(const Tensor&, Shape, const OptionalTensor&, const OptionalTensor&, double)>();
    return op.call(x, shape, weight, bias, eps);
}

Three layer_norm_forward_op(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias,
                            double eps) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::layer_norm_forward", "").typed<
        Three(const Tensor&, Shape, const OptionalTensor&, const OptionalTensor&, double)>();
    return op.call(x, shape, weight, bias, eps);
}

Three layer_norm_backward_op(const Tensor& grad_out, const Tensor& x, Shape shape, const Tensor& mean,
                             const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias,
                             std::array<bool, 3> wanted) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::layer_norm_backward", "").typed<
        Three(const Tensor&, const Tensor&, Shape, const Tensor&, const Tensor&, const OptionalTensor&,
              const OptionalTensor&, std::array<bool, 3>)>();
    return op.call(grad_out, x, shape, mean, rstd, weight, bias, wanted);
}

void check_affine(const Tensor& x, Shape shape, const OptionalTensor& given, const char* name) {
    if (!given.has_value()) return;
    TORCH_CHECK_VALUE(given->sym_sizes() == shape, kName, ": ", name, " has shape ", given->sym_sizes(),
                      ", but normalized_shape is ", shape, "; they are the same.");
    TORCH_CHECK_VALUE(given->device() == x.device(), kName, ": ", name, " is on ", given->device(), " and x on ",
                      x.device(), ".");
    TORCH_CHECK_TYPE(given->scalar_type() == x.scalar_type() || given->scalar_type() == at::kFloat, kName, ": ", name,
                     " is ", given->scalar_type(), " and x ", x.scalar_type(), ". It has x's dtype or float32.");
}

void check(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias) {
    cpu_type(x, kName);
    const int64_t depth = static_cast<int64_t>(shape.size());
    const bool fits = depth >= 1 && depth <= x.dim() && x.sym_sizes().slice(x.dim() - depth) == shape;
    TORCH_CHECK_VALUE(fits, kName, ": normalized_shape ", shape, " are not the last dimensions of x, whose shape is ",
                      x.sym_sizes(), ".");
    check_affine(x, shape, weight, "weight");
    check_affine(x, shape, bias, "bias");
    TORCH_CHECK_TYPE(!weight.has_value() || !bias.has_value() || weight->scalar_type() == bias->scalar_type(), kName,
                     ": weight is ", weight->scalar_type(), " and bias ", bias->scalar_type(), "; they are the same.");
}

// x as [rows, n]: the dimensions before `shape`, and the product of `shape`.
struct Rows {
    int64_t rows = 1, n = 1;

    Rows(const Tensor& x, size_t depth) {
        const int64_t split = x.dim() - static_cast<int64_t>(depth);
        for (int64_t i = 0; i < x.dim(); ++i) (i < split ? rows : n) *= x.size(i);
    }
};

Tensor empty_statistics(const Tensor& x, size_t depth) {
    const auto sizes = x.sym_sizes().slice(0, x.dim() - depth);
    return at::empty_symint(sizes, x.options().dtype(accumulator_type(x.scalar_type())));
}

const Tensor* either(const OptionalTensor& weight, const OptionalTensor& bias) {
    return weight.has_value() ? &*weight : bias.has_value() ? &*bias : nullptr;
}

void* data_or_null(const Tensor& x) { return x.defined() ? x.data_ptr() : nullptr; }

// The three implementations fill y, and mean and rstd where they are defined.
void forward_cpu(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, size_t depth,
                 const Tensor& y, const Tensor& mean, const Tensor& rstd) {
    const Rows shape(x, depth);
    const Tensor* affine = either(weight, bias);
    const auto type = cpu_type(x, kName);
    const cpu::LayerNormForward task{x.const_data_ptr(), fuseline::data_or_null(weight), fuseline::data_or_null(bias),
                                     y.data_ptr(), data_or_null(mean), data_or_null(rstd), shape.n, eps, type,
                                     affine == nullptr ? type : cpu_type(*affine, kName)};
    static const auto run = FUSELINE_PICK(cpu::layer_norm_forward);
    parallel_rows(shape.rows, row_grain(shape.n), task.scratch(),
                  [&](int64_t begin, int64_t end, void* scratch) { run(task, begin, end, scratch); });
}

void forward_cuda(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, size_t depth,
                  const Tensor& y, const Tensor& mean, const Tensor& rstd) {
    const Rows shape(x, depth);
    const Tensor* affine = either(weight, bias);
    const int dtype = kernel_dtype(x, kName);
    static const auto launch = FUSELINE_KERNEL(fuseline_layer_norm_forward);
    const int code = launch(x.const_data_ptr(), fuseline::data_or_null(weight), fuseline::data_or_null(bias),
                            y.data_ptr(), static_cast<float*>(data_or_null(mean)),
                            static_cast<float*>(data_or_null(rstd)), shape.rows, shape.n, eps, dtype,
                            affine == nullptr ? dtype : kernel_dtype(*affine, kName), current_stream(x));
    check_launch(code, kName);
}

void forward_meta(const Tensor&, const OptionalTensor&, const OptionalTensor&, double, size_t, const Tensor&,
                  const Tensor&, const Tensor&) {}

template <auto fill>
Three forward(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
              bool statistics) {
    check(x, shape, weight, bias);
    const c10::OptionalDeviceGuard guard(x.device());
    const size_t depth = shape.size();
    Tensor y = at::empty_symint(x.sym_sizes(), x.options()), mean, rstd;
    if (statistics) {
        mean = empty_statistics(x, depth);
        rstd = empty_statistics(x, depth);
    }
    if constexpr (fill != forward_meta) {
        if (y.numel() > 0) {
            fill(x.contiguous(), contiguous(weight), contiguous(bias), eps, depth, y, mean, rstd);
        } else if (statistics) {  // rows of nothing
            mean.zero_();
            rstd.zero_();
        }
    }
    return {y, mean, rstd};
}

template <auto fill>
Three layer_norm_forward(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias,
                         double eps) {
    return forward<fill>(x, shape, weight, bias, eps, true);
}

template <auto fill>
Tensor layer_norm(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
    return std::get<0>(forward<fill>(x, shape, weight, bias, eps, false));
}

struct Gradients {
    Tensor x, weight, bias;
};

void backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                  const OptionalTensor& weight, size_t depth, Gradients& grads) {
    const Rows shape(x, depth);
    const auto type = cpu_type(x, kName);
    const cpu::LayerNormBackward task{grad_out.const_data_ptr(), x.const_data_ptr(), fuseline::data_or_null(weight),
                                      mean.const_data_ptr(), rstd.const_data_ptr(), data_or_null(grads.x), shape.n,
                                      type, weight.has_value() ? cpu_type(*weight, kName) : type};
    // Cut the same way for any number of threads, and add the parts up in order: the same bits every time.
    constexpr int64_t most_parts = 64, fewest_rows = 8;
    const int64_t part_rows = std::max(fewest_rows, (shape.rows + most_parts - 1) / most_parts);
    const int64_t parts = (shape.rows + part_rows - 1) / part_rows;
    const int64_t sums = grads.weight.defined() + grads.bias.defined();
    const auto options = x.options().dtype(accumulator_type(x.scalar_type()));
    const Tensor partials = sums > 0 ? at::zeros({sums, parts, shape.n}, options) : Tensor();
    const auto partial = [&](int64_t sum, int64_t part) -> void* {
        return static_cast<char*>(partials.data_ptr()) + (sum * parts + part) * shape.n * partials.element_size();
    };
    static const auto run = FUSELINE_PICK(cpu::layer_norm_backward);
    const int64_t grain = std::max<int64_t>(1, row_grain(shape.n) / part_rows);
    parallel_rows(parts, grain, task.scratch(), [&](int64_t begin, int64_t end, void* scratch) {
        for (int64_t part = begin; part < end; ++part) {
            const cpu::LayerNormPartial to{grads.weight.defined() ? partial(0, part) : nullptr,
                                           grads.bias.defined() ? partial(sums - 1, part) : nullptr};
            run(task, to, part * part_rows, std::min(shape.rows, (part + 1) * part_rows), scratch);
        }
    });
    static const auto add_up = FUSELINE_PICK(cpu::column_sums);
    const auto finish = [&](int64_t sum, const Tensor& grad) {
        const cpu::ColumnSums columns{partial(sum, 0), parts, shape.n, grad.data_ptr(), cpu_type(grad, kName),
                                      type == cpu::Type::f64};
        at::parallel_for(0, shape.n, row_grain(parts), [&](int64_t begin, int64_t end) { add_up(columns, begin, end); });
    };
    if (grads.weight.defined()) finish(0, grads.weight);
    if (grads.bias.defined()) finish(sums - 1, grads.bias);
}

void backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                   const OptionalTensor& weight, size_t depth, Gradients& grads) {
    const Rows shape(x, depth);
    const int dtype = kernel_dtype(x, kName);
    const Tensor* affine = weight.has_value()        ? &*weight
                           : grads.weight.defined() ? &grads.weight
                           : grads.bias.defined()   ? &grads.bias
                                                    : nullptr;
    static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_layer_norm_backward_workspace);
    static const auto launch = FUSELINE_KERNEL(fuseline_layer_norm_backward);
    Tensor workspace;
    if (grads.weight.defined() || grads.bias.defined()) {
        const auto bytes = static_cast<int64_t>(workspace_bytes(shape.rows, shape.n, dtype));
        workspace = at::empty({bytes}, x.options().dtype(at::kByte));
    }
    const int code = launch(grad_out.const_data_ptr(), x.const_data_ptr(), fuseline::data_or_null(weight),
                            mean.const_data_ptr<float>(), rstd.const_data_ptr<float>(), data_or_null(grads.x),
                            data_or_null(grads.weight), data_or_null(grads.bias), data_or_null(workspace), shape.rows,
                            shape.n, dtype, affine == nullptr ? dtype : kernel_dtype(*affine, kName),
                            current_stream(x));
    check_launch(code, "layer_norm_backward");
}

void backward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, size_t,
                   Gradients&) {}

template <auto fill>
Three layer_norm_backward(const Tensor& grad_out, const Tensor& x, Shape shape, const Tensor& mean, const Tensor& rstd,
                          const OptionalTensor& weight, const OptionalTensor& bias, std::array<bool, 3> wanted) {
    TORCH_CHECK_VALUE(grad_out.sym_sizes() == x.sym_sizes(), "layer_norm_backward: grad_out has shape ",
                      grad_out.sym_sizes(), " and x ", x.sym_sizes(), "; they are the same.");
    TORCH_CHECK_TYPE(grad_out.scalar_type() == x.scalar_type(), "layer_norm_backward: grad_out is ",
                     grad_out.scalar_type(), " and x ", x.scalar_type(), "; they are the same.");
    const c10::OptionalDeviceGuard guard(x.device());
    Gradients grads;
    const auto wanted_like = [](bool want, const Tensor& like) {
        return want ? at::empty_symint(like.sym_sizes(), like.options()) : Tensor();
    };
    grads.x = wanted_like(wanted[0], x);
    if (weight.has_value()) grads.weight = wanted_like(wanted[1], *weight);
    if (bias.has_value()) grads.bias = wanted_like(wanted[2], *bias);
    if constexpr (fill != backward_meta) {
        if (x.numel() > 0) {
            fill(grad_out.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous(), contiguous(weight),
                 shape.size(), grads);
        } else {
            if (grads.weight.defined()) grads.weight.zero_();
            if (grads.bias.defined()) grads.bias.zero_();
        }
    }
    return {grads.x, grads.weight, grads.bias};
}

struct LayerNorm : torch::autograd::Function<LayerNorm> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                          const OptionalTensor& bias, Shape shape, double eps) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        auto [y, mean, rstd] = layer_norm_forward_op(x, shape, weight, bias, eps);
        // ctx->needs_input_grad(i) counts only tensors that are there, so what is wanted is noted here.
        ctx->saved_data["wanted"] =
            c10::List<bool>({x.requires_grad(), wants_grad(weight), wants_grad(bias)});
        ctx->saved_data["shape"] = shape.vec();
        ctx->save_for_backward({x, mean, rstd, weight.value_or(Tensor()), bias.value_or(Tensor())});
        return y;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto shape = ctx->saved_data["shape"].toSymIntVector();
        const auto flags = ctx->saved_data["wanted"].toBoolList();
        const auto optional = [](const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; };
        const auto weight = optional(saved[3]), bias = optional(saved[4]);
        size_t edge = 0;
        std::array<bool, 3> wanted = {false, false, false};
        const std::array<bool, 3> present = {true, weight.has_value(), bias.has_value()};
        for (size_t i = 0; i < 3; ++i) {
            if (!present[i]) continue;
            wanted[i] = flags.get(i) && ctx->needs_input_grad(edge);
            ++edge;
        }
        auto [grad_x, grad_weight, grad_bias] =
            layer_norm_backward_op(grads[0], saved[0], shape, saved[1], saved[2], weight, bias, wanted);
        return {grad_x, grad_weight, grad_bias, Tensor(), Tensor()};
    }
};

Tensor layer_norm_autograd(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps) {
    if (at::GradMode::is_enabled() && (wants_grad(x) || wants_grad(weight) || wants_grad(bias))) {
        return LayerNorm::apply(x, weight, bias, shape, eps);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return layer_norm_op(x, shape, weight, bias, eps);
}

Three layer_norm_backward_autograd(const Tensor& grad_out, const Tensor& x, Shape shape, const Tensor& mean,
                                   const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias,
                                   std::array<bool, 3> wanted) {
    auto [grad_x, grad_weight, grad_bias] = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return layer_norm_backward_op(grad_out, x, shape, mean, rstd, weight, bias, wanted);
    }();
    if (!at::GradMode::is_enabled() || !(wants_grad(grad_out) || wants_grad(x) || wants_grad(weight))) {
        return {grad_x, grad_weight, grad_bias};
    }
    const Tensor& affine = weight.has_value() ? *weight : x;
    const auto refuse = [&](const Tensor& result, const Tensor& saved) {
        return result.defined() ? NoSecondDerivative::apply(result, grad_out, saved, std::string(kName)) : result;
    };
    return {refuse(refuse(grad_x, affine), x), refuse(grad_weight, x), refuse(grad_bias, x)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) "
          "-> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("layer_norm_forward(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
          "-> (Tensor y, Tensor mean, Tensor rstd)",
          {at::Tag::pt2_compliant_tag});
    m.def("layer_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd, "
          "Tensor? weight, Tensor? bias, bool[3] wanted) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
          {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(fuseline, CPU, m) {
    m.impl("layer_norm", layer_norm<forward_cpu>);
    m.impl("layer_norm_forward", layer_norm_forward<forward_cpu>);
    m.impl("layer_norm_backward", layer_norm_backward<backward_cpu>);
}

TORCH_LIBRARY_IMPL(fuseline, CUDA, m) {
    m.impl("layer_norm", layer_norm<forward_cuda>);
    m.impl("layer_norm_forward", layer_norm_forward<forward_cuda>);
    m.impl("layer_norm_backward", layer_norm_backward<backward_cuda>);
}

TORCH_LIBRARY_IMPL(fuseline, Meta, m) {
    m.impl("layer_norm", layer_norm<forward_meta>);
    m.impl("layer_norm_forward", layer_norm_forward<forward_meta>);
    m.impl("layer_norm_backward", layer_norm_backward<backward_meta>);
}

TORCH_LIBRARY_IMPL(fuseline, Autograd, m) {
    m.impl("layer_norm", layer_norm_autograd);
    m.impl("layer_norm_backward", layer_norm_backward_autograd);
}

}  // namespace fuseline
