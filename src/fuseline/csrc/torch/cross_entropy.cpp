// Cross-entropy of logits with targets over the last dimension, and its gradient.
//
// `cross_entropy` is what callers call. Where a gradient will be wanted it runs `cross_entropy_forward`, which also
// returns what the backward starts from, statistics of each row and the divisor of the mean, or, on request, the
// gradient itself. `cross_entropy_` and `cross_entropy_forward_` write that gradient in place of the logits.

#include <ATen/ops/empty.h>

#include <cmath>
#include <tuple>

#include "cross_entropy.h"

namespace fuseline::cross_entropy_op {
namespace {

using namespace losses;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

#define FUSELINE_OPTION_TYPES \
    int64_t, double, c10::string_view, std::optional<double>, double, OptionalSize
#define FUSELINE_OPTION_PARAMETERS \
    int64_t ignore_index, double label_smoothing, c10::string_view reduction, std::optional<double> soft_cap, \
        double z_loss, OptionalSize vocab_size
#define FUSELINE_OPTIONS \
    Options { ignore_index, label_smoothing, reduction, soft_cap, z_loss, vocab_size }
#define FUSELINE_OPTION_VALUES(o) \
    (o).ignore_index, (o).label_smoothing, (o).reduction, (o).soft_cap, (o).z_loss, (o).vocab_size

Tensor cross_entropy_op(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o,
                        bool grad_in_forward) {
    constexpr Op<"cross_entropy", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES, bool)> op;
    return op(logits, target, weight, FUSELINE_OPTION_VALUES(o), grad_in_forward);
}

Four cross_entropy_forward_op(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Options& o, bool gradient) {
    constexpr Op<"cross_entropy_forward", Four(const Tensor&, const Tensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES, bool)> op;
    return op(logits, target, weight, FUSELINE_OPTION_VALUES(o), gradient);
}

Tensor cross_entropy_forward_in_place_op(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                                         const Options& o) {
    constexpr Op<"cross_entropy_forward_", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES)> op;
    return op(logits, target, weight, FUSELINE_OPTION_VALUES(o));
}

Tensor cross_entropy_backward_op(const Tensor& grad_out, const Tensor& logits, const Tensor& target,
                                 const Tensor& statistics, const Tensor& total, const OptionalTensor& weight,
                                 const Options& o) {
    constexpr Op<"cross_entropy_backward", Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                  const OptionalTensor&, FUSELINE_OPTION_TYPES)> op;
    return op(grad_out, logits, target, statistics, total, weight, FUSELINE_OPTION_VALUES(o));
}

constexpr Op<"scale_rows_", void(const Tensor&, const Tensor&)> scale_rows_op;

void check(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o) {
    cpu_type(logits, kName);
    TORCH_CHECK_VALUE(logits.dim() >= 1, kName,
                      ": logits has no dimension; it is [..., V], a row of V for each target.");
    TORCH_CHECK_VALUE(logits.sym_size(-1) >= 1, kName, ": logits has shape ", logits.sym_sizes(),
                      ", no class to choose from.");
    TORCH_CHECK_TYPE(target.scalar_type() == at::kLong || target.scalar_type() == at::kInt, kName, ": target is ",
                     target.scalar_type(), "; it holds class numbers, int64 or int32. Convert it with target.long().");
    TORCH_CHECK_VALUE(target.sym_sizes() == logits.sym_sizes().slice(0, logits.dim() - 1), kName,
                      ": target has shape ", target.sym_sizes(), " and logits ", logits.sym_sizes(),
                      "; target has the shape of logits without the last dimension, the classes.");
    TORCH_CHECK_VALUE(target.device() == logits.device(), kName, ": target is on ", target.device(), " and logits on ",
                      logits.device(), ". Move it with target.to(logits.device).");
    TORCH_CHECK_VALUE(o.reduction == "mean" || o.reduction == "sum" || o.reduction == "none", kName,
                      ": reduction is '", o.reduction, "'; it is 'mean', 'sum' or 'none'.");
    TORCH_CHECK_VALUE(o.label_smoothing >= 0 && o.label_smoothing <= 1, kName, ": label_smoothing is ",
                      o.label_smoothing, "; it is a share, from 0 to 1.");
    TORCH_CHECK_VALUE(!o.soft_cap.has_value() || (*o.soft_cap > 0 && std::isfinite(*o.soft_cap)), kName,
                      ": soft_cap is ", o.cap(), "; it is finite and above 0, or None for none.");
    if (o.vocab_size.has_value()) {
        TORCH_CHECK_VALUE(*o.vocab_size >= 1 && *o.vocab_size <= logits.sym_size(-1), kName, ": vocab_size is ",
                          *o.vocab_size, "; logits has ", logits.sym_size(-1), " columns, and at least one counts.");
    }
    if (!weight.has_value()) return;
    const c10::SymInt columns = o.vocab_size.has_value() ? *o.vocab_size : logits.sym_size(-1);
    TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == columns, kName, ": weight has shape ",
                      weight->sym_sizes(), "; it is [", columns, "], one for each class.");
    check_device(kName, *weight, "weight", logits, "logits");
    TORCH_CHECK_TYPE(at::isFloatingType(weight->scalar_type()), kName, ": weight is ", weight->scalar_type(),
                     "; it is of a floating dtype.");
}

at::TensorOptions accumulators(const Tensor& logits) {
    return logits.options().dtype(accumulator_type(logits.scalar_type()));
}

Tensor empty_loss(const Tensor& logits, const Tensor& target, const Options& o) {
    const auto options = accumulators(logits);
    return o.none() ? at::empty_symint(target.sym_sizes(), options) : at::empty({}, options);
}

Results allocate(const Tensor& logits, const Tensor& target, const Options& o, bool gradient) {
    const auto options = accumulators(logits);
    Results r;
    r.loss = empty_loss(logits, target, o);
    auto sizes = target.sym_sizes().vec();
    sizes.emplace_back(2);
    r.statistics = at::empty_symint(sizes, options);
    r.total = o.mean() ? at::empty({}, options) : at::empty({0}, options);
    r.grad = gradient ? at::empty_symint(logits.sym_sizes(), logits.options()) : at::empty({0}, logits.options());
    return r;
}

// ---- the ops ----

void forward_meta(const Tensor&, const Tensor&, const OptionalTensor&, const Options&, Results&, void*) {}
void backward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                   const Options&, Tensor&) {}
void scale_rows_meta(const Tensor&, const Tensor&) {}

template <Forward fill>
Tensor cross_entropy(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                     FUSELINE_OPTION_PARAMETERS, bool) {
    const Options o = FUSELINE_OPTIONS;
    check(logits, target, weight, o);
    Results r{empty_loss(logits, target, o), Tensor(), Tensor(), Tensor()};
    fill(logits, target, weight, o, r, nullptr);
    return r.loss;
}

template <Forward fill>
Four cross_entropy_forward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                           FUSELINE_OPTION_PARAMETERS, bool gradient) {
    const Options o = FUSELINE_OPTIONS;
    check(logits, target, weight, o);
    Results r = allocate(logits, target, o, gradient);
    void* grad = nullptr;
    if constexpr (fill != forward_meta) grad = gradient ? r.grad.mutable_data_ptr() : nullptr;
    fill(logits, target, weight, o, r, grad);
    return {r.loss, r.statistics, r.total, r.grad};
}

template <Forward fill>
Tensor cross_entropy_forward_in_place(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                                      FUSELINE_OPTION_PARAMETERS) {
    const Options o = FUSELINE_OPTIONS;
    check(logits, target, weight, o);
    TORCH_CHECK_VALUE(logits.is_contiguous(), kName, ": inplace writes the gradient over the logits, which are not "
                      "contiguous: shape ", logits.sym_sizes(), ", strides ", logits.sym_strides(),
                      ". Call it without inplace, or on logits.contiguous().");
    Results r{empty_loss(logits, target, o), Tensor(), Tensor(), Tensor()};
    if (o.mean()) r.total = at::empty({}, r.loss.options());
    void* grad = nullptr;
    if constexpr (fill != forward_meta) grad = logits.mutable_data_ptr();
    fill(logits, target, weight, o, r, grad);
    return r.loss;
}

template <Backward fill>
Tensor cross_entropy_backward(const Tensor& grad_out, const Tensor& logits, const Tensor& target,
                              const Tensor& statistics, const Tensor& total, const OptionalTensor& weight,
                              FUSELINE_OPTION_PARAMETERS) {
    const Options o = FUSELINE_OPTIONS;
    check(logits, target, weight, o);
    Tensor grad = at::empty_symint(logits.sym_sizes(), logits.options());
    if constexpr (fill != backward_meta) {
        if (grad.numel() > 0) fill(grad_out, logits, target, statistics, total, weight, o, grad);
    }
    return grad;
}

// Multiplies x [..., N] by a scalar, or by one factor a row, in place.
template <void (*fill)(const Tensor&, const Tensor&)>
void scale_rows(const Tensor& x, const Tensor& factors) {
    fill(x, factors);
}

struct CrossEntropyLoss : torch::autograd::Function<CrossEntropyLoss> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                          const OptionalTensor& weight, FUSELINE_OPTION_PARAMETERS) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        auto [loss, statistics, total, grad] =
            cross_entropy_forward_op(logits, target, weight, FUSELINE_OPTIONS, false);
        ctx->saved_data["ignore_index"] = ignore_index;
        ctx->saved_data["label_smoothing"] = label_smoothing;
        ctx->saved_data["reduction"] = std::string(reduction);
        ctx->saved_data["soft_cap"] = soft_cap.value_or(0.0);
        ctx->saved_data["z_loss"] = z_loss;
        if (vocab_size.has_value()) ctx->saved_data["vocab_size"] = *vocab_size;
        ctx->save_for_backward({logits, target, statistics, total, weight.value_or(Tensor())});
        return loss;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const std::string reduction = ctx->saved_data["reduction"].toStringRef();
        const double cap = ctx->saved_data["soft_cap"].toDouble();
        const auto size = ctx->saved_data.find("vocab_size");
        const Options o{ctx->saved_data["ignore_index"].toInt(),
                        ctx->saved_data["label_smoothing"].toDouble(),
                        reduction,
                        cap > 0 ? std::optional<double>(cap) : std::nullopt,
                        ctx->saved_data["z_loss"].toDouble(),
                        size == ctx->saved_data.end() ? OptionalSize() : OptionalSize(size->second.toSymInt())};
        const Tensor grad = cross_entropy_backward_op(grads[0], saved[0], saved[1], saved[2], saved[3], optional(saved[4]), o);
        return {grad, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    }
};

// The gradient is computed with the loss, into a tensor of its own or over the logits; the backward scales it.
struct CrossEntropyWithGradient : torch::autograd::Function<CrossEntropyWithGradient> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                          const OptionalTensor& weight, FUSELINE_OPTION_PARAMETERS, bool in_place) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const Options o = FUSELINE_OPTIONS;
        Tensor loss, grad;
        if (in_place) {
            loss = cross_entropy_forward_in_place_op(logits, target, weight, o);
            logits.unsafeGetTensorImpl()->bump_version();  // whoever saved the logits for a backward is told so
            grad = logits.detach();
        } else {
            std::tie(loss, std::ignore, std::ignore, grad) = cross_entropy_forward_op(logits, target, weight, o, true);
        }
        ctx->saved_data["ignore_index"] = ignore_index;
        ctx->save_for_backward({grad, target});
        return loss;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        TORCH_CHECK(ctx->saved_data.find("spent") == ctx->saved_data.end(), kName, ": the gradient that was written in "
                    "the forward pass serves one backward pass, and this is another over the same graph. Call it "
                    "without grad_in_forward.");
        ctx->saved_data["spent"] = true;
        const auto saved = ctx->get_saved_variables();
        const Tensor& grad = saved[0];
        // What is ignored has no gradient, be the one that is given infinite: a sum divided by a count of 0 gives that.
        const Tensor ignored = saved[1].eq(ctx->saved_data["ignore_index"].toInt());
        const Tensor given = grads[0].to(accumulator_type(grad.scalar_type()));
        scale_rows_op(grad, given.masked_fill(given.dim() == ignored.dim() ? ignored : ignored.all(), 0.0));
        const Tensor result =
            at::GradMode::is_enabled()
                ? NoSecondDerivative::apply(grad, grads[0], of_running_node(grad), std::string(kName))
                : grad;
        return {result, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    }
};

Tensor cross_entropy_autograd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              FUSELINE_OPTION_PARAMETERS, bool grad_in_forward) {
    if (tracked(logits)) {
        if (grad_in_forward) {
            return CrossEntropyWithGradient::apply(logits, target, weight, ignore_index, label_smoothing, reduction,
                                                   soft_cap, z_loss, vocab_size, false);
        }
        return CrossEntropyLoss::apply(logits, target, weight, ignore_index, label_smoothing, reduction, soft_cap,
                                       z_loss, vocab_size);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return cross_entropy_op(logits, target, weight, FUSELINE_OPTIONS, grad_in_forward);
}

// With nobody to give a gradient to, the logits stay as they are.
Tensor cross_entropy_in_place_autograd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                                       FUSELINE_OPTION_PARAMETERS) {
    if (tracked(logits)) {
        TORCH_CHECK_VALUE(!logits.is_leaf(), kName, ": inplace would overwrite a leaf tensor, whose values nobody "
                          "could compute again. Call it without inplace.");
        return CrossEntropyWithGradient::apply(logits, target, weight, ignore_index, label_smoothing, reduction,
                                               soft_cap, z_loss, vocab_size, true);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return cross_entropy_op(logits, target, weight, FUSELINE_OPTIONS, false);
}

}  // namespace

#define FUSELINE_OPTION_SCHEMA \
    "int ignore_index, float label_smoothing, str reduction, float? soft_cap, float z_loss, SymInt? vocab_size"

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "cross_entropy(Tensor logits, Tensor target, *, Tensor? weight=None, int ignore_index=-100, "
              "float label_smoothing=0.0, str reduction=\"mean\", float? soft_cap=None, float z_loss=0.0, "
              "SymInt? vocab_size=None, bool grad_in_forward=False) -> Tensor",
           cross_entropy<forward_cpu>, cross_entropy<forward_cuda>, cross_entropy<forward_meta>);
    m.def("cross_entropy_(Tensor(a!) logits, Tensor target, *, Tensor? weight=None, int ignore_index=-100, "
          "float label_smoothing=0.0, str reduction=\"mean\", float? soft_cap=None, float z_loss=0.0, "
          "SymInt? vocab_size=None) -> Tensor", {at::Tag::pt2_compliant_tag});
    define(m, "cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, " FUSELINE_OPTION_SCHEMA
              ", bool gradient) -> (Tensor loss, Tensor statistics, Tensor total, Tensor grad)",
           cross_entropy_forward<forward_cpu>, cross_entropy_forward<forward_cuda>, cross_entropy_forward<forward_meta>);
    define(m, "cross_entropy_forward_(Tensor(a!) logits, Tensor target, Tensor? weight, " FUSELINE_OPTION_SCHEMA
              ") -> Tensor",
           cross_entropy_forward_in_place<forward_cpu>, cross_entropy_forward_in_place<forward_cuda>, cross_entropy_forward_in_place<forward_meta>);
    define(m, "cross_entropy_backward(Tensor grad_out, Tensor logits, Tensor target, Tensor statistics, Tensor total, "
              "Tensor? weight, " FUSELINE_OPTION_SCHEMA ") -> Tensor",
           cross_entropy_backward<backward_cpu>, cross_entropy_backward<backward_cuda>, cross_entropy_backward<backward_meta>);
    define(m, "scale_rows_(Tensor(a!) x, Tensor factors) -> ()",
           scale_rows<scale_rows_cpu>, scale_rows<scale_rows_cuda>, scale_rows<scale_rows_meta>);
    differentiate<cross_entropy_autograd>(m, "cross_entropy");
    differentiate<cross_entropy_in_place_autograd>(m, "cross_entropy_");
    refuse_second_derivative<"cross_entropy_backward", "cross_entropy", cross_entropy_backward<backward_meta>>(m);
}

// Another file compiled after this one has its own.
#undef FUSELINE_OPTION_TYPES
#undef FUSELINE_OPTION_PARAMETERS
#undef FUSELINE_OPTION_VALUES
#undef FUSELINE_OPTION_SCHEMA
#undef FUSELINE_OPTIONS

}  // namespace fuseline::cross_entropy_op
