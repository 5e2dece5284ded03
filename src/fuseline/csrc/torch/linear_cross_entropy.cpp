// Cross-entropy of a linear head, hidden @ weight^T + bias, without its logits: they exist for a chunk of rows at a
// time, and their gradient is written over them, or powers from which it follows are written in their place; where only
// the loss is wanted a kernel has it from the product's own sums (linear_head_loss.cpp).
//
// `linear_cross_entropy` is what callers call. Where a gradient will be wanted it runs `linear_cross_entropy_forward`,
// which also returns the gradients: by powers, or of one chunk, but in fp16, with a mean's divisor in them, else of the
// sum of the rows' losses. The backward scales them, in one pass and in place where no other can follow, by the gradient
// of the loss and what divisor is left. A loss for each row has its gradients computed in the backward
// (`linear_cross_entropy_rows_backward`), from logits computed again.

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <initializer_list>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "linear_head.h"
#include "spent_gradient.h"
#include "op.h"

namespace fuseline::linear_cross_entropy_op {
namespace {

using namespace linear_head;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

#define FUSELINE_OPTION_TYPES \
    int64_t, double, c10::string_view, std::optional<double>, double, OptionalSize, c10::SymInt
#define FUSELINE_OPTION_PARAMETERS \
    int64_t ignore_index, double label_smoothing, c10::string_view reduction, std::optional<double> soft_cap, \
        double z_loss, OptionalSize vocab_size, c10::SymInt chunk_size
#define FUSELINE_OPTIONS \
    Options { {ignore_index, label_smoothing, reduction, soft_cap, z_loss, vocab_size}, chunk_size }
#define FUSELINE_OPTION_VALUES(o) \
    (o).ignore_index, (o).label_smoothing, (o).reduction, (o).soft_cap, (o).z_loss, (o).vocab_size, (o).chunk_size

// ---- the ops, as others of them call them ----

Tensor whole_op(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                const OptionalTensor& class_weight, const Options& o) {
    constexpr Op<"linear_cross_entropy", Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                const OptionalTensor&, FUSELINE_OPTION_TYPES)> op;
    return op(hidden, weight, target, bias, class_weight, FUSELINE_OPTION_VALUES(o));
}

Five forward_op(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                const OptionalTensor& class_weight, const Options& o, std::array<bool, 3> wanted) {
    constexpr Op<"linear_cross_entropy_forward", Five(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                      const OptionalTensor&, FUSELINE_OPTION_TYPES, std::array<bool, 3>)> op;
    return op(hidden, weight, target, bias, class_weight, FUSELINE_OPTION_VALUES(o), wanted);
}

constexpr Op<"linear_cross_entropy_backward", Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    at::ScalarType, std::array<bool, 3>)> backward_op;

Three rows_backward_op(const Tensor& grad_out, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                       const OptionalTensor& bias, const OptionalTensor& class_weight, const Options& o,
                       std::array<bool, 3> wanted) {
    constexpr Op<"linear_cross_entropy_rows_backward",
                 Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       FUSELINE_OPTION_TYPES, std::array<bool, 3>)> op;
    return op(grad_out, hidden, weight, target, bias, class_weight, FUSELINE_OPTION_VALUES(o), wanted);
}

// ---- kernels, for any device ----

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const OptionalTensor& bias, const OptionalTensor& class_weight,
                            FUSELINE_OPTION_PARAMETERS) {
    const Options o = FUSELINE_OPTIONS;
    check(hidden, weight, target, bias, o);
    const WithoutAutocast off;
    const Head given(hidden, weight, target, bias, class_weight, o);
    const Tensor fused = loss_without_logits(given, o);
    if (fused.defined()) return o.none() ? fused.view(target.sizes()) : fused;
    const Head head = given.padded();
    const Options of_width = head.of_width(o);
    if (head.rows > 0 && head.chunks == 1) {
        const Tensor loss = chunk_loss(head.logits(head.hidden), head.target, class_weight, of_width, o.reduction);
        return o.none() ? loss.view(target.sizes()) : loss;
    }
    const auto options = hidden.options().dtype(accumulator_type(hidden.scalar_type()));
    if (o.none()) {
        Tensor loss = at::empty({head.rows}, options);
        head.each_chunk([&](int64_t begin, int64_t length) {
            loss.narrow(0, begin, length).copy_(chunk_loss(head.logits(head.hidden.narrow(0, begin, length)),
                                                           head.target.narrow(0, begin, length), class_weight, of_width,
                                                           "none"));
        });
        return loss.reshape(target.sizes());
    }
    Tensor loss = at::zeros({}, options);
    head.each_chunk([&](int64_t begin, int64_t length) {
        loss.add_(chunk_loss(head.logits(head.hidden.narrow(0, begin, length)), head.target.narrow(0, begin, length),
                             class_weight, of_width, "sum"));
    });
    return o.mean() ? loss.div_(divisor(head, o, options)) : loss;
}

// The total that the backward pass divides by, infinite where every target is ignored or there is none: no row has a
// gradient then, and what is 0 is not to become NaN, be it divided by 0 or multiplied by an infinite gradient.
Tensor marked(Tensor total, const Head& head, const Options& o) {
    return total.masked_fill_(head.target.eq(o.ignore_index).all(), std::numeric_limits<double>::infinity());
}

Five linear_cross_entropy_forward(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                  const OptionalTensor& bias, const OptionalTensor& class_weight,
                                  FUSELINE_OPTION_PARAMETERS, std::array<bool, 3> wanted) {
    const Options o = FUSELINE_OPTIONS;
    check(hidden, weight, target, bias, o);
    TORCH_CHECK_VALUE(!o.none(), kName, "_forward: a loss for each row has no gradient before its own is known.");
    const WithoutAutocast off;
    const Head head = Head(hidden, weight, target, bias, class_weight, o).padded();
    const auto options = hidden.options().dtype(accumulator_type(hidden.scalar_type()));
    const auto type = saved_type(hidden, weight);
    Gradients gradients(head, wanted, type);
    const auto given = [&](const Tensor& gradient) { return gradient.defined() ? gradient : at::empty({0}, options); };
    const auto results = [&](const Tensor& loss, const Tensor& total) -> Five {
        gradients.clear_from(head.counted(o));
        const Tensor grad_hidden = wanted[0] ? gradients.hidden.view(hidden.sizes()) : Tensor();
        return {loss, total, given(grad_hidden), given(gradients.weight_as(type)), given(gradients.bias_as(type))};
    };
    const Tensor sum = loss_by_powers(head, o, gradients);
    if (sum.defined()) return results(sum, marked(at::ones({}, options), head, o));
    // The gradient of one chunk's mean is divided as it is written; that of fp16 would leave its range.
    const bool divided = o.mean() && head.rows > 0 && head.chunks == 1 && hidden.scalar_type() != at::kHalf;
    Tensor loss;
    head.each_chunk([&](int64_t begin, int64_t length) {
        const Tensor logits = head.logits(head.hidden.narrow(0, begin, length));
        const Tensor part = chunk_loss_and_gradient(logits, head.target.narrow(0, begin, length), class_weight,
                                                    head.of_width(o), divided ? "mean" : "sum");
        loss = loss.defined() ? loss.add_(part) : part;
        gradients.add(logits, begin);
    });
    if (!loss.defined()) loss = at::zeros({}, options);
    const Tensor total = o.mean() && !divided ? divisor(head, o, options) : at::ones({}, options);
    if (o.mean() && !divided) loss.div_(total);
    return results(loss, marked(total, head, o));
}

Tensor factor_of(const Tensor& grad_out, const Tensor& total) {
    const Tensor divisor = total.reshape({});
    return grad_out.div(divisor).masked_fill(divisor.isinf(), 0.0);
}

Three linear_cross_entropy_backward(const Tensor& grad_out, const Tensor& total, const Tensor& grad_hidden,
                                    const Tensor& grad_weight, const Tensor& grad_bias, at::ScalarType weight_dtype,
                                    std::array<bool, 3> wanted) {
    const WithoutAutocast off;
    const Tensor factor = factor_of(grad_out, total);
    const auto scaled = [&](bool want, const Tensor& gradient, at::ScalarType type) {
        return want ? gradient.mul(factor).to(type) : Tensor();
    };
    return {scaled(wanted[0], grad_hidden, grad_hidden.scalar_type()), scaled(wanted[1], grad_weight, weight_dtype),
            scaled(wanted[2], grad_bias, weight_dtype)};
}

Three linear_cross_entropy_rows_backward(const Tensor& grad_out, const Tensor& hidden, const Tensor& weight,
                                         const Tensor& target, const OptionalTensor& bias,
                                         const OptionalTensor& class_weight, FUSELINE_OPTION_PARAMETERS,
                                         std::array<bool, 3> wanted) {
    const Options o = FUSELINE_OPTIONS;
    const WithoutAutocast off;
    const Head head = Head(hidden, weight, target, bias, class_weight, o).padded();
    Gradients gradients(head, wanted, saved_type(hidden, weight));
    const int64_t counted = o.columns(weight.t());
    // What is ignored has no gradient, whatever is given for it.
    const Tensor given = grad_out.reshape({-1})
                             .to(accumulator_type(hidden.scalar_type()))
                             .masked_fill(head.target.eq(o.ignore_index), 0.0);
    head.each_chunk([&](int64_t begin, int64_t length) {
        const Tensor logits = head.logits(head.hidden.narrow(0, begin, length));
        chunk_loss_and_gradient(logits, head.target.narrow(0, begin, length), class_weight, head.of_width(o), "sum");
        scale_rows_op(logits, given.narrow(0, begin, length));
        // The words that do not count stay clear of what is given, be it NaN.
        if (counted < logits.size(1)) logits.narrow(1, counted, logits.size(1) - counted).zero_();
        gradients.add(logits, begin);
    });
    gradients.clear_from(counted);
    const Tensor grad_hidden = wanted[0] ? gradients.hidden.view(hidden.sizes()) : Tensor();
    return {grad_hidden, gradients.weight_as(weight.scalar_type()), gradients.bias_as(weight.scalar_type())};
}

// ---- Meta ----

at::TensorOptions accumulators(const Tensor& hidden) {
    return hidden.options().dtype(accumulator_type(hidden.scalar_type()));
}

Tensor like(const Tensor& x, at::ScalarType type) { return at::empty_symint(x.sym_sizes(), x.options().dtype(type)); }

Tensor linear_cross_entropy_meta(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                 const OptionalTensor& bias, const OptionalTensor&, FUSELINE_OPTION_PARAMETERS) {
    const Options o = FUSELINE_OPTIONS;
    check(hidden, weight, target, bias, o);
    return o.none() ? at::empty_symint(target.sym_sizes(), accumulators(hidden)) : at::empty({}, accumulators(hidden));
}

Five linear_cross_entropy_forward_meta(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                       const OptionalTensor& bias, const OptionalTensor&, FUSELINE_OPTION_PARAMETERS,
                                       std::array<bool, 3> wanted) {
    const Options o = FUSELINE_OPTIONS;
    check(hidden, weight, target, bias, o);
    const auto options = accumulators(hidden);
    const Tensor nothing = at::empty({0}, options);
    const auto type = saved_type(hidden, weight);
    return {at::empty({}, options), at::empty({}, options),
            wanted[0] ? like(hidden, hidden.scalar_type()) : at::empty({0}, options),
            wanted[1] ? like(weight, type) : at::empty({0}, options),
            wanted[2] ? like(*bias, type) : at::empty({0}, options)};
}

Three linear_cross_entropy_backward_meta(const Tensor&, const Tensor&, const Tensor& grad_hidden,
                                         const Tensor& grad_weight, const Tensor& grad_bias,
                                         at::ScalarType weight_dtype, std::array<bool, 3> wanted) {
    return {wanted[0] ? like(grad_hidden, grad_hidden.scalar_type()) : Tensor(),
            wanted[1] ? like(grad_weight, weight_dtype) : Tensor(),
            wanted[2] ? like(grad_bias, weight_dtype) : Tensor()};
}

Three linear_cross_entropy_rows_backward_meta(const Tensor&, const Tensor& hidden, const Tensor& weight, const Tensor&,
                                              const OptionalTensor& bias, const OptionalTensor&,
                                              FUSELINE_OPTION_PARAMETERS, std::array<bool, 3> wanted) {
    return {wanted[0] ? like(hidden, hidden.scalar_type()) : Tensor(),
            wanted[1] ? like(weight, weight.scalar_type()) : Tensor(),
            wanted[2] ? like(*bias, weight.scalar_type()) : Tensor()};
}

// ---- autograd ----

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const Tensor& target,
                          const OptionalTensor& bias, const OptionalTensor& class_weight, FUSELINE_OPTION_PARAMETERS) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const Options o = FUSELINE_OPTIONS;
        const std::array<bool, 3> wanted = {hidden.requires_grad(), weight.requires_grad(), wants_grad(bias)};
        ctx->saved_data["wanted"] = c10::List<bool>({wanted[0], wanted[1], wanted[2]});
        ctx->saved_data["bias"] = bias.has_value();
        ctx->saved_data["rows"] = o.none();
        ctx->saved_data["weight_dtype"] = static_cast<int64_t>(weight.scalar_type());
        if (!o.none()) {
            auto [loss, total, grad_hidden, grad_weight, grad_bias] =
                forward_op(hidden, weight, target, bias, class_weight, o, wanted);
            ctx->save_for_backward({total, grad_hidden, grad_weight, grad_bias});
            return loss;
        }
        ctx->saved_data["ignore_index"] = ignore_index;
        ctx->saved_data["label_smoothing"] = label_smoothing;
        ctx->saved_data["soft_cap"] = soft_cap.value_or(0.0);
        ctx->saved_data["z_loss"] = z_loss;
        if (vocab_size.has_value()) ctx->saved_data["vocab_size"] = *vocab_size;
        ctx->saved_data["chunk_size"] = chunk_size;
        ctx->save_for_backward(
            {hidden, weight, target, bias.value_or(Tensor()), class_weight.value_or(Tensor())});
        return whole_op(hidden, weight, target, bias, class_weight, o);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto flags = ctx->saved_data["wanted"].toBoolList();
        std::array<bool, 3> wanted;
        // The edges of this node are the tensors that are there: hidden, weight, target, then bias.
        const std::array<size_t, 3> edges = {0, 1, 3};
        for (size_t i = 0; i < 3; ++i) wanted[i] = flags.get(i) && ctx->needs_input_grad(edges[i]);
        Three result;
        if (ctx->saved_data["rows"].toBool()) {
            const double cap = ctx->saved_data["soft_cap"].toDouble();
            const auto size = ctx->saved_data.find("vocab_size");
            const Options o{ctx->saved_data["ignore_index"].toInt(),
                            ctx->saved_data["label_smoothing"].toDouble(),
                            "none",
                            cap > 0 ? std::optional<double>(cap) : std::nullopt,
                            ctx->saved_data["z_loss"].toDouble(),
                            size == ctx->saved_data.end() ? OptionalSize() : OptionalSize(size->second.toSymInt()),
                            ctx->saved_data["chunk_size"].toSymInt()};
            result = rows_backward_op(grads[0], saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]), o,
                                      wanted);
        } else {
            const auto type = static_cast<at::ScalarType>(ctx->saved_data["weight_dtype"].toInt());
            const std::array<at::ScalarType, 3> types = {saved[1].scalar_type(), type, type};
            bool in_place = !recorded(grads[0]);
            for (size_t i = 0; i < 3; ++i) in_place = in_place && (!wanted[i] || spent_here(saved[1 + i], types[i]));
            if (in_place) {  // which costs nothing where they are multiplied by 1
                const at::AutoDispatchBelowADInplaceOrView guard;
                const Tensor factor = factor_of(grads[0], saved[0]);
                std::array<Tensor, 3> scaled;
                for (size_t i = 0; i < 3; ++i) {
                    if (wanted[i]) scale_rows_op(scaled[i] = saved[1 + i], factor);
                }
                result = {scaled[0], scaled[1], scaled[2]};
            } else {
                const Tensor total = at::GradMode::is_enabled() ? of_running_node(saved[0]) : saved[0];
                result = backward_op(grads[0], total, saved[1], saved[2], saved[3], type, wanted);
            }
        }
        auto [grad_hidden, grad_weight, grad_bias] = result;
        variable_list all(12);
        all[0] = grad_hidden, all[1] = grad_weight, all[3] = grad_bias;
        return all;
    }
};

Tensor linear_cross_entropy_autograd(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                     const OptionalTensor& bias, const OptionalTensor& class_weight,
                                     FUSELINE_OPTION_PARAMETERS) {
    if (tracked(hidden, weight, bias)) {
        return LinearCrossEntropy::apply(hidden, weight, target, bias, class_weight, ignore_index, label_smoothing,
                                         reduction, soft_cap, z_loss, vocab_size, chunk_size);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return whole_op(hidden, weight, target, bias, class_weight, FUSELINE_OPTIONS);
}

}  // namespace

#define FUSELINE_OPTION_SCHEMA \
    "int ignore_index, float label_smoothing, str reduction, float? soft_cap, float z_loss, SymInt? vocab_size, " \
    "SymInt chunk_size"

// The same code on every device: the work is done by matrix products and the ops it calls.
TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, "
              "Tensor? class_weight=None, int ignore_index=-100, float label_smoothing=0.0, str reduction=\"mean\", "
              "float? soft_cap=None, float z_loss=0.0, SymInt? vocab_size=None, SymInt chunk_size=4096) -> Tensor",
           linear_cross_entropy, linear_cross_entropy, linear_cross_entropy_meta);
    define(m, "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
              "Tensor? class_weight, " FUSELINE_OPTION_SCHEMA ", bool[3] wanted) -> (Tensor loss, Tensor total, "
              "Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
           linear_cross_entropy_forward, linear_cross_entropy_forward, linear_cross_entropy_forward_meta);
    define(m, "linear_cross_entropy_backward(Tensor grad_out, Tensor total, Tensor grad_hidden, Tensor grad_weight, "
              "Tensor grad_bias, ScalarType weight_dtype, bool[3] wanted) -> (Tensor grad_hidden, Tensor grad_weight, "
              "Tensor grad_bias)",
           linear_cross_entropy_backward, linear_cross_entropy_backward, linear_cross_entropy_backward_meta);
    define(m, "linear_cross_entropy_rows_backward(Tensor grad_out, Tensor hidden, Tensor weight, Tensor target, "
              "Tensor? bias, Tensor? class_weight, " FUSELINE_OPTION_SCHEMA ", bool[3] wanted) -> (Tensor grad_hidden, "
              "Tensor grad_weight, Tensor grad_bias)",
           linear_cross_entropy_rows_backward, linear_cross_entropy_rows_backward, linear_cross_entropy_rows_backward_meta);
    differentiate<linear_cross_entropy_autograd>(m, "linear_cross_entropy");
    refuse_second_derivative<"linear_cross_entropy_backward", "linear_cross_entropy", linear_cross_entropy_backward>(m);
    refuse_second_derivative<"linear_cross_entropy_rows_backward", "linear_cross_entropy", linear_cross_entropy_rows_backward>(m);
}

// Another file compiled after this one has its own.
#undef FUSELINE_OPTION_TYPES
#undef FUSELINE_OPTION_PARAMETERS
#undef FUSELINE_OPTION_VALUES
#undef FUSELINE_OPTION_SCHEMA
#undef FUSELINE_OPTIONS

}  // namespace fuseline::linear_cross_entropy_op
