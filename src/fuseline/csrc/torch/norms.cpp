// The norms and their gradients: layer_norm, rms_norm, and both of residual + dropout(x + x_bias), which return the sum
// as well.
//
// y may be of fewer bits than what is normalized: where the residual is float32 and x of 16 bits (the sum is then
// float32, y of 16 bits), or where the caller says so (out_dtype).
//
// The names that callers call differ in their arguments alone. Where a gradient will be wanted they run `norm_forward`,
// which also returns the rows' mean and rstd for `norm_backward`; elsewhere the statistics are not written.
//
// The backward reads what was normalized. Where that is float32, y of 16 bits and there are no weight and bias, it reads y, which
// is (x - mean) * rstd: half of the bytes, and what reads y next mostly keeps it anyway.

#include "norms.h"
#include "spent_gradient.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <limits>
#include <tuple>

namespace fuseline::norms_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 5>;  // gradients of residual, x, weight, bias, x_bias

enum class Device { cpu, cuda, meta };

c10::SymDimVector as_vector(Shape shape) { return c10::SymDimVector(shape.begin(), shape.end()); }

// The dimensions of an RMS norm are those of its weight, or the last one.
c10::SymDimVector rms_shape(const Tensor& x, const OptionalTensor& weight, const char* op) {
    if (weight.has_value()) return as_vector(weight->sym_sizes());
    TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x has no dimensions; it is [..., N].");
    return {x.sym_size(-1)};
}

double rms_eps(const Tensor& x, std::optional<double> eps) {
    if (eps.has_value()) return *eps;
    const auto type = x.scalar_type();
    return type == at::kDouble     ? std::numeric_limits<double>::epsilon()
           : type == at::kHalf     ? 0x1p-10
           : type == at::kBFloat16 ? 0x1p-7
                                   : std::numeric_limits<float>::epsilon();
}

template <Device device>
Normalized forward(const NormArguments& a, bool statistics) {
    check_norm(a);
    const c10::OptionalDeviceGuard guard(a.x.device());
    Normalized result;
    result.y = at::empty_symint(a.x.sym_sizes(), a.x.options().dtype(a.y_type()));
    if (a.residual.has_value()) result.sum = at::empty_symint(a.x.sym_sizes(), a.residual->options());
    if (statistics) {
        const auto sizes = a.x.sym_sizes().slice(0, a.x.dim() - a.depth());
        const auto options = a.x.options().dtype(accumulator_type(a.x.scalar_type()));
        if (a.centred) result.mean = at::empty_symint(sizes, options);
        result.rstd = at::empty_symint(sizes, options);
    }
    if constexpr (device != Device::meta) {
        if (a.x.numel() > 0) {
            device == Device::cpu ? norm_forward_cpu(as_rows(a), result) : norm_forward_cuda(as_rows(a), result);
        } else {  // rows of nothing
            if (result.mean.defined()) result.mean.zero_();
            if (result.rstd.defined()) result.rstd.zero_();
        }
    }
    return result;
}

template <Device device>
Four norm_forward(const std::string& op, const Tensor& x, const OptionalTensor& residual, Shape shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps, const OptionalTensor& x_bias,
                  double p, const OptionalTensor& seed, bool centred, std::optional<at::ScalarType> out_dtype) {
    const auto made = forward<device>(
        {op.c_str(), x, residual, x_bias, weight, bias, seed, as_vector(shape), eps, p, centred, out_dtype}, true);
    return {made.y, made.sum, made.mean, made.rstd};
}

// `x` is what was normalized, or with `normalized` y of a norm without weight and bias, of 16 bits where the former was float32.
// Gradients that are not wanted are undefined; where nothing is dropped and dtypes are the
// same, that of x is that of residual.
template <Device device>
Five norm_backward(const std::string& op, const Tensor& grad_y, const OptionalTensor& grad_sum, const Tensor& x,
                   Shape shape, const OptionalTensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                   const OptionalTensor& bias, const OptionalTensor& x_bias, double p, const OptionalTensor& seed,
                   Wanted wanted, bool normalized) {
    const auto type = normalized ? at::kFloat : x.scalar_type();
    TORCH_CHECK_TYPE(!normalized || (x.scalar_type() != at::kFloat && x.scalar_type() == grad_y.scalar_type()),
                     "norm_backward: what is normalized is ", x.scalar_type(), " and grad_y ", grad_y.scalar_type(),
                     "; they are the same, Half or BFloat16.");
    check_norm_gradient(grad_y, x, type, "grad_y", true);
    check_norm_gradient(grad_sum, x, type, "grad_sum", false);
    const c10::OptionalDeviceGuard guard(x.device());
    const auto wanted_like = [](bool want, const OptionalTensor& like) {
        return want && like.has_value() ? at::empty_symint(like->sym_sizes(), like->options()) : Tensor();
    };
    NormGradients grads{grad_y.contiguous(),
                        contiguous(grad_sum),
                        wanted[0] ? at::empty_symint(x.sym_sizes(), x.options().dtype(type)) : Tensor(),
                        wanted_like(wanted[1], grad_y),
                        wanted_like(wanted[2], weight),
                        wanted_like(wanted[3], bias),
                        wanted_like(wanted[4], x_bias)};
    if constexpr (device != Device::meta) {
        if (x.numel() > 0) {
            const Norm norm = as_rows({op.c_str(), x, std::nullopt, std::nullopt, weight, std::nullopt, seed,
                                       as_vector(shape), 0.0, p, mean.has_value()});
            const Normalized saved{normalized ? norm.x : Tensor(), normalized ? Tensor() : norm.x,
                                   mean.has_value() ? mean->contiguous() : Tensor(), rstd.contiguous()};
            device == Device::cpu ? norm_backward_cpu(norm, saved, grads) : norm_backward_cuda(norm, saved, grads);
        } else {
            for (const Tensor* sums : {&grads.weight, &grads.bias, &grads.x_bias}) {
                if (sums->defined()) sums->zero_();
            }
        }
    }
    return {grads.residual, grads.x, grads.weight, grads.bias, grads.x_bias};
}

Four norm_forward_op(const NormArguments& a) {
    constexpr Op<"norm_forward", decltype(norm_forward<Device::cpu>)> op;
    return op(a.op, a.x, a.residual, a.shape, a.weight, a.bias, a.eps, a.x_bias, a.p, a.seed, a.centred, a.out_dtype);
}

constexpr Op<"norm_backward", decltype(norm_backward<Device::cpu>)> norm_backward_op;

struct NormFunction : torch::autograd::Function<NormFunction> {
    static constexpr bool is_traceable = true;

    // y, and the sum where there is a residual, or x where it is wanted beside y.
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                                 const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& x_bias,
                                 const OptionalTensor& seed, const NormArguments* a) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        auto [y, sum, mean, rstd] = norm_forward_op(*a);
        // ctx->needs_input_grad(i) counts only tensors that are there, so what is wanted is noted here.
        ctx->saved_data["wanted"] = c10::List<bool>(
            {x.requires_grad(), wants_grad(residual), wants_grad(weight), wants_grad(bias), wants_grad(x_bias)});
        ctx->saved_data["shape"] = std::vector<c10::SymInt>(a->shape.begin(), a->shape.end());
        ctx->saved_data["p"] = a->p;
        ctx->saved_data["y_type"] = static_cast<int64_t>(a->y_type());
        ctx->saved_data["op"] = std::string(a->op);
        const auto or_none = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
        const Tensor& added_up = residual.has_value() ? sum : x;
        const bool y_is_enough = added_up.scalar_type() == at::kFloat && a->y_type() != at::kFloat && !weight.has_value() &&
                                 !bias.has_value();
        ctx->save_for_backward({y_is_enough ? y : added_up, mean, rstd, or_none(weight), or_none(bias), or_none(x_bias),
                                or_none(seed)});
        ctx->saved_data["normalized"] = y_is_enough;
        ctx->saved_data["added"] = residual.has_value();
        ctx->set_materialize_grads(false);
        if (a->returns_x) return {y, at::alias(x)};
        return residual.has_value() ? variable_list{y, sum} : variable_list{y};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto shape = ctx->saved_data["shape"].toSymIntVector();
        const auto flags = ctx->saved_data["wanted"].toBoolList();
        const double p = ctx->saved_data["p"].toDouble();
        const bool added = ctx->saved_data["added"].toBool();
        const Tensor grad_sum = grads.size() == 2 ? grads[1] : Tensor();
        variable_list result(7);
        if (!grads[0].defined() && !grad_sum.defined()) return result;
        const std::array<bool, 5> present = {true, added, saved[3].defined(), saved[4].defined(), saved[5].defined()};
        std::array<bool, 5> wants = {};  // x, residual, weight, bias, x_bias
        size_t edge = 0;
        for (size_t i = 0; i < 5; ++i) {
            if (!present[i]) continue;
            wants[i] = flags.get(i) && ctx->needs_input_grad(edge);
            ++edge;
        }
        const auto y_type = static_cast<at::ScalarType>(ctx->saved_data["y_type"].toInt());
        // What drops, or rounds to fewer bits, gives x a gradient of its own.
        const bool normalized = ctx->saved_data["normalized"].toBool();
        const bool drops = p > 0 || (added && (normalized || y_type != saved[0].scalar_type()));
        const Wanted wanted = {wants[1] || (wants[0] && !drops), wants[0] && drops, wants[2], wants[3], wants[4]};
        const Tensor grad_y = grads[0].defined() ? grads[0] : at::zeros_like(saved[0], y_type);
        const auto [grad_residual, grad_x, grad_weight, grad_bias, grad_x_bias] = norm_backward_op(
            ctx->saved_data["op"].toStringRef(), grad_y, optional(grad_sum), saved[0], shape, optional(saved[1]), saved[2],
            optional(saved[3]), optional(saved[4]), optional(saved[5]), p, optional(saved[6]), wanted, normalized);
        if (wants[0]) result[0] = drops ? grad_x : grad_residual;
        if (wants[1]) result[1] = grad_residual;
        result[2] = grad_weight, result[3] = grad_bias, result[4] = grad_x_bias;
        return result;
    }
};

bool needs_graph(const NormArguments& a) { return tracked(a.x, a.residual, a.weight, a.bias, a.x_bias); }

variable_list with_graph(const NormArguments& a) {
    return NormFunction::apply(a.x, a.residual, a.weight, a.bias, a.x_bias, a.seed, &a);
}

Five norm_backward_autograd(const std::string& op, const Tensor& grad_y, const OptionalTensor& grad_sum,
                            const Tensor& x, Shape shape, const OptionalTensor& mean, const Tensor& rstd,
                            const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& x_bias,
                            double p, const OptionalTensor& seed, Wanted wanted, bool normalized) {
    variable_list tracked;
    if (at::GradMode::is_enabled()) {
        for (const OptionalTensor& each : {OptionalTensor(grad_y), grad_sum, OptionalTensor(x), weight}) add_tracked(tracked, each);
    }
    const Five made = norm_backward_op.below_autograd(op, grad_y, grad_sum, x, shape, mean, rstd, weight, bias, x_bias, p, seed,
                                                      wanted, normalized);
    return refused(made, tracked, op.c_str());
}

// ---- the ops by name ----

struct LayerNorm {
    static constexpr OpName kName{"layer_norm"};
    using Schema = Tensor(const Tensor&, Shape, const OptionalTensor&, const OptionalTensor&, double,
                          std::optional<at::ScalarType>);

    static NormArguments arguments(const Tensor& x, Shape shape, const OptionalTensor& weight,
                                   const OptionalTensor& bias, double eps,
                                   std::optional<at::ScalarType> out_dtype) {
        return {"layer_norm", x, std::nullopt, std::nullopt, weight, bias, std::nullopt, as_vector(shape), eps, 0.0,
                true, out_dtype};
    }
};

// y, and x for who else reads it: their gradients are added where that of x is computed, not in a pass of its own.
Two layer_norm_and_input(const Tensor& x, Shape shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                         std::optional<at::ScalarType> out_dtype) {
    NormArguments a = LayerNorm::arguments(x, shape, weight, bias, eps, out_dtype);
    const bool forward_mode = forward_mode_is_on();
    const bool transformed = is_transformed(x, forward_mode) || is_transformed(weight, forward_mode) ||
                             is_transformed(bias, forward_mode);
    if (!needs_graph(a) || recorded(x) || transformed || c10::impl::dispatch_mode_enabled()) {
        constexpr fuseline::Op<LayerNorm::kName, LayerNorm::Schema> op;
        return {op(x, shape, weight, bias, eps, out_dtype), x};
    }
    a.returns_x = true;
    const auto made = with_graph(a);
    return {made[0], made[1]};
}

struct RmsNorm {
    static constexpr OpName kName{"rms_norm"};
    using Schema = Tensor(const Tensor&, const OptionalTensor&, std::optional<double>, std::optional<at::ScalarType>);

    static NormArguments arguments(const Tensor& x, const OptionalTensor& weight, std::optional<double> eps,
                               std::optional<at::ScalarType> out_dtype) {
        return {"rms_norm",   x,   std::nullopt, std::nullopt, weight, std::nullopt, std::nullopt,
                rms_shape(x, weight, "rms_norm"), rms_eps(x, eps), 0.0, false, out_dtype};
    }
};

struct AddLayerNorm {
    static constexpr OpName kName{"add_layer_norm"};
    using Schema = Two(const Tensor&, const Tensor&, Shape, const OptionalTensor&, const OptionalTensor&, double);

    static NormArguments arguments(const Tensor& x, const Tensor& residual, Shape shape, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps) {
        return {"add_layer_norm", x, residual, std::nullopt, weight, bias, std::nullopt, as_vector(shape), eps, 0.0,
                true};
    }
};

struct AddRmsNorm {
    static constexpr OpName kName{"add_rms_norm"};
    using Schema = Two(const Tensor&, const Tensor&, const OptionalTensor&, std::optional<double>);

    static NormArguments arguments(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                               std::optional<double> eps) {
        return {"add_rms_norm", x, residual, std::nullopt, weight, std::nullopt, std::nullopt,
                rms_shape(x, weight, "add_rms_norm"), rms_eps(x, eps), 0.0, false};
    }
};

struct DropoutAddLayerNorm {
    static constexpr OpName kName{"dropout_add_layer_norm"};
    using Schema = Two(const Tensor&, const Tensor&, Shape, const OptionalTensor&, const OptionalTensor&, double,
                       const OptionalTensor&, double, const OptionalTensor&);

    static NormArguments arguments(const Tensor& x, const Tensor& residual, Shape shape, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, const OptionalTensor& x_bias, double p,
                               const OptionalTensor& seed) {
        return {"dropout_add_layer_norm", x, residual, x_bias, weight, bias, seed, as_vector(shape), eps, p, true};
    }
};

struct DropoutAddRmsNorm {
    static constexpr OpName kName{"dropout_add_rms_norm"};
    using Schema = Two(const Tensor&, const Tensor&, const OptionalTensor&, std::optional<double>,
                       const OptionalTensor&, double, const OptionalTensor&);

    static NormArguments arguments(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                               std::optional<double> eps, const OptionalTensor& x_bias, double p,
                               const OptionalTensor& seed) {
        return {"dropout_add_rms_norm", x, residual, x_bias, weight, std::nullopt, seed,
                rms_shape(x, weight, "dropout_add_rms_norm"), rms_eps(x, eps), p, false};
    }
};

// An op's kernel for a device, and for autograd.
template <class Named, class Schema = typename Named::Schema>
struct Kernels;

template <class Named, class Result, class... Given>
struct Kernels<Named, Result(Given...)> {
    template <Device device>
    static Result on(Given... given) {
        const auto made = forward<device>(Named::arguments(given...), false);
        if constexpr (std::is_same_v<Result, Tensor>) {
            return made.y;
        } else {
            return {made.y, made.sum};
        }
    }

    static Result autograd(Given... given) {
        const NormArguments a = Named::arguments(given...);
        if (needs_graph(a)) {
            const auto made = with_graph(a);
            if constexpr (std::is_same_v<Result, Tensor>) {
                return made[0];
            } else {
                return {made[0], made[1]};
            }
        }
        constexpr fuseline::Op<Named::kName, Result(Given...)> op;
        return op.below_autograd(given...);
    }
};

template <class Named>
void define_norm(torch::Library& m, const char* schema) {
    using Made = Kernels<Named>;
    define(m, schema, Made::template on<Device::cpu>, Made::template on<Device::cuda>, Made::template on<Device::meta>);
    differentiate<Made::autograd>(m, Named::kName.text);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_norm<LayerNorm>(m, "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
                              "float eps=1e-5, *, ScalarType? out_dtype=None) -> Tensor");
    m.def("layer_norm_and_input(Tensor(a) x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
          "float eps=1e-5, *, ScalarType? out_dtype=None) -> (Tensor y, Tensor(a) input)", layer_norm_and_input);
    define_norm<RmsNorm>(m, "rms_norm(Tensor x, Tensor? weight=None, float? eps=None, *, ScalarType? out_dtype=None) -> Tensor");
    define_norm<AddLayerNorm>(m, "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
                                 "Tensor? bias=None, float eps=1e-5) -> (Tensor y, Tensor sum)");
    define_norm<AddRmsNorm>(m, "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=None) -> "
                               "(Tensor y, Tensor sum)");
    define_norm<DropoutAddLayerNorm>(
        m, "dropout_add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
           "float eps=1e-5, *, Tensor? x_bias=None, float p=0.0, Tensor? seed=None) -> (Tensor y, Tensor sum)");
    define_norm<DropoutAddRmsNorm>(
        m, "dropout_add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=None, *, Tensor? x_bias=None, "
           "float p=0.0, Tensor? seed=None) -> (Tensor y, Tensor sum)");
    define(m, "norm_forward(str op, Tensor x, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
              "float eps, Tensor? x_bias, float p, Tensor? seed, bool centred, ScalarType? out_dtype=None) -> (Tensor y, "
              "Tensor sum, Tensor mean, Tensor rstd)",
           norm_forward<Device::cpu>, norm_forward<Device::cuda>, norm_forward<Device::meta>);
    define(m, "norm_backward(str op, Tensor grad_y, Tensor? grad_sum, Tensor x, SymInt[] normalized_shape, Tensor? mean, "
              "Tensor rstd, Tensor? weight, Tensor? bias, Tensor? x_bias, float p, Tensor? seed, bool[5] wanted, "
              "bool normalized=False) -> "
              "(Tensor grad_residual, Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_x_bias)",
           norm_backward<Device::cpu>, norm_backward<Device::cuda>, norm_backward<Device::meta>);
    differentiate<norm_backward_autograd>(m, "norm_backward");
}

}  // namespace fuseline::norms_op
