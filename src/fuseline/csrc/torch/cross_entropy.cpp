// Cross-entropy of logits with targets over the last dimension, and its gradient.
//
// `cross_entropy` is what callers call. Where a gradient will be wanted it runs `cross_entropy_forward`, which also
// returns what the backward starts from, statistics of each row and the divisor of the mean, or, on request, the
// gradient itself. `cross_entropy_` and `cross_entropy_forward_` write that gradient in place of the logits.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <string>
#include <tuple>

#include "fuseline_torch.h"

namespace fuseline {
namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalSize = std::optional<c10::SymInt>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kName = "cross_entropy";

// What every op of this family takes after its tensors.
struct Options {
    int64_t ignore_index;
    double label_smoothing;
    c10::string_view reduction;
    std::optional<double> soft_cap;
    double z_loss;
    OptionalSize vocab_size;

    double cap() const { return soft_cap.value_or(0.0); }
    bool mean() const { return reduction == "mean"; }
    bool none() const { return reduction == "none"; }
    // Columns that count.
    int64_t columns(const Tensor& logits) const {
        return vocab_size.has_value() ? vocab_size->guard_int(__FILE__, __LINE__) : logits.size(-1);
    }
};

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
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::cross_entropy", "").typed<
        Tensor(const Tensor&, const Tensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES, bool)>();
    return op.call(logits, target, weight, FUSELINE_OPTION_VALUES(o), grad_in_forward);
}

Four cross_entropy_forward_op(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Options& o, bool gradient) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::cross_entropy_forward", "").typed<
        Four(const Tensor&, const Tensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES, bool)>();
    return op.call(logits, target, weight, FUSELINE_OPTION_VALUES(o), gradient);
}

Tensor cross_entropy_forward_in_place_op(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                                         const Options& o) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::cross_entropy_forward_", "").typed<
        Tensor(const Tensor&, const Tensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES)>();
    return op.call(logits, target, weight, FUSELINE_OPTION_VALUES(o));
}

Tensor cross_entropy_backward_op(const Tensor& grad_out, const Tensor& logits, const Tensor& target,
                                 const Tensor& statistics, const Tensor& total, const OptionalTensor& weight,
                                 const Options& o) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::cross_entropy_backward", "").typed<
        Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
               FUSELINE_OPTION_TYPES)>();
    return op.call(grad_out, logits, target, statistics, total, weight, FUSELINE_OPTION_VALUES(o));
}

void scale_rows_op(const Tensor& x, const Tensor& factors) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::scale_rows_", "").typed<
        void(const Tensor&, const Tensor&)>();
    op.call(x, factors);
}

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
    TORCH_CHECK_VALUE(!o.soft_cap.has_value() || *o.soft_cap > 0, kName, ": soft_cap is ", o.cap(),
                      "; it is above 0, or None for none.");
    if (o.vocab_size.has_value()) {
        TORCH_CHECK_VALUE(*o.vocab_size >= 1 && *o.vocab_size <= logits.sym_size(-1), kName, ": vocab_size is ",
                          *o.vocab_size, "; logits has ", logits.sym_size(-1), " columns, and at least one counts.");
    }
    if (!weight.has_value()) return;
    const c10::SymInt columns = o.vocab_size.has_value() ? *o.vocab_size : logits.sym_size(-1);
    TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == columns, kName, ": weight has shape ",
                      weight->sym_sizes(), "; it is [", columns, "], one for each class.");
    TORCH_CHECK_VALUE(weight->device() == logits.device(), kName, ": weight is on ", weight->device(),
                      " and logits on ", logits.device(), ".");
    TORCH_CHECK_TYPE(at::isFloatingType(weight->scalar_type()), kName, ": weight is ", weight->scalar_type(),
                     "; it is of a floating dtype.");
}

at::TensorOptions accumulators(const Tensor& logits) {
    return logits.options().dtype(accumulator_type(logits.scalar_type()));
}

// The tensors of one call, as the kernels take them.
struct Problem {
    Tensor logits, target;
    OptionalTensor weight, weight_sum;
    int64_t rows, n, width;

    Problem(const Tensor& given, const Tensor& targets, const OptionalTensor& weights, const Options& o)
        : logits(given.contiguous()), target(targets.contiguous()), n(o.columns(given)), width(given.size(-1)) {
        rows = target.numel();
        if (!weights.has_value()) return;
        weight = weights->to(accumulators(given).dtype()).contiguous();
        if (o.label_smoothing != 0) weight_sum = weight->sum();
    }
};

const float* floats(const OptionalTensor& x) { return x.has_value() ? x->const_data_ptr<float>() : nullptr; }

// What the forward returns: the loss reduced, and what its backward starts from.
struct Results {
    Tensor loss;   // rows, or a scalar
    Tensor statistics;  // rows and 2: the largest score, and the sum of the exponentials against it
    Tensor total;  // of the mean: the divisor
    Tensor grad;   // of the logits, if asked
};

Results allocate(const Tensor& logits, const Tensor& target, const Options& o, bool gradient) {
    const auto options = accumulators(logits);
    Results r;
    r.loss = o.none() ? at::empty_symint(target.sym_sizes(), options) : at::empty({}, options);
    auto sizes = target.sym_sizes().vec();
    sizes.emplace_back(2);
    r.statistics = at::empty_symint(sizes, options);
    r.total = o.mean() ? at::empty({}, options) : at::empty({0}, options);
    r.grad = gradient ? at::empty_symint(logits.sym_sizes(), logits.options()) : at::empty({0}, logits.options());
    return r;
}

// ---- CPU ----

void check_targets(const Tensor& target, int64_t n, int64_t ignore_index) {
    const int64_t* classes = target.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < target.numel(); ++i) {
        TORCH_CHECK_INDEX((classes[i] >= 0 && classes[i] < n) || classes[i] == ignore_index, kName, ": target ", i,
                          " is ", classes[i], "; classes go from 0 to ", n - 1, ", and ignore_index is ", ignore_index,
                          ".");
    }
}

cpu::CrossEntropy task_for(const Problem& p, const Options& o, const Tensor& statistics) {
    cpu::CrossEntropy task{};
    task.logits = p.logits.const_data_ptr(), task.target = p.target.const_data_ptr<int64_t>();
    task.weight = data_or_null(p.weight);
    task.weight_sum = p.weight_sum.has_value() ? p.weight_sum->item<double>() : static_cast<double>(p.n);
    task.total = 1, task.statistics = statistics.mutable_data_ptr();
    task.n = p.n, task.width = p.width, task.ignore_index = o.ignore_index;
    task.label_smoothing = o.label_smoothing, task.soft_cap = o.cap(), task.z_loss = o.z_loss;
    task.type = cpu_type(p.logits, kName);
    return task;
}

// The sum of a row tensor of accumulators in double and in order: the same bits with any number of threads.
double in_order(const Tensor& rows) {
    double sum = 0;
    for (int64_t i = 0; i < rows.numel(); ++i) {
        sum += rows.scalar_type() == at::kDouble ? rows.const_data_ptr<double>()[i]
                                                 : static_cast<double>(rows.const_data_ptr<float>()[i]);
    }
    return sum;
}

double total_on_cpu(const Problem& p, const Options& o) {
    const int64_t* classes = p.target.const_data_ptr<int64_t>();
    double total = 0;
    for (int64_t i = 0; i < p.rows; ++i) {
        if (classes[i] == o.ignore_index) continue;
        total += !p.weight.has_value()                         ? 1.0
                 : p.weight->scalar_type() == at::kDouble ? p.weight->const_data_ptr<double>()[classes[i]]
                                                           : p.weight->const_data_ptr<float>()[classes[i]];
    }
    return total;
}

void forward_cpu(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o,
                 Results& r, void* grad) {
    const Problem p(logits, target.to(at::kLong), weight, o);
    check_targets(p.target, p.n, o.ignore_index);
    cpu::CrossEntropy task = task_for(p, o, r.statistics);
    const Tensor rows = o.none() ? r.loss : at::empty({p.rows}, r.loss.options());
    task.loss = rows.mutable_data_ptr(), task.grad = grad;
    if (o.mean()) {
        task.total = total_on_cpu(p, o);
        r.total.fill_(task.total);
    }
    if (p.rows > 0) {
        static const auto run = FUSELINE_PICK(cpu::cross_entropy_forward);
        parallel_rows(p.rows, row_grain(p.width), task.scratch(),
                      [&](int64_t begin, int64_t end, void* scratch) { run(task, begin, end, scratch); });
    }
    if (!o.none()) r.loss.fill_(o.mean() ? in_order(rows) / task.total : in_order(rows));
}

void backward_cpu(const Tensor& grad_out, const Tensor& logits, const Tensor& target, const Tensor& statistics,
                  const Tensor& total, const OptionalTensor& weight, const Options& o, Tensor& grad) {
    const Problem p(logits, target.to(at::kLong), weight, o);
    cpu::CrossEntropy task = task_for(p, o, statistics);
    const Tensor given = grad_out.contiguous();
    task.grad_out = given.const_data_ptr(), task.one_grad_out = !o.none(), task.grad = grad.mutable_data_ptr();
    if (o.mean()) task.total = total.item<double>();
    static const auto run = FUSELINE_PICK(cpu::cross_entropy_backward);
    parallel_rows(p.rows, row_grain(p.width), task.scratch(),
                  [&](int64_t begin, int64_t end, void* scratch) { run(task, begin, end, scratch); });
}

void scale_rows_cpu(const Tensor& x, const Tensor& factors) {
    x.mul_(factors.dim() == 0 ? factors : factors.unsqueeze(-1));
}

// ---- CUDA ----

int target_bytes(const Tensor& target) { return static_cast<int>(target.element_size()); }

// The loss of all rows, or the divisor of their mean, or both.
void reduce_cuda(const Problem& p, const Options& o, const Tensor* rows, float* sum, float* total) {
    static const auto bytes = FUSELINE_KERNEL(fuseline_cross_entropy_reduce_workspace);
    static const auto launch = FUSELINE_KERNEL(fuseline_cross_entropy_reduce);
    const auto room = static_cast<int64_t>(bytes(p.rows));
    const Tensor workspace = room > 0 ? at::empty({room}, p.logits.options().dtype(at::kByte)) : Tensor();
    check_launch(launch(rows != nullptr ? rows->const_data_ptr<float>() : nullptr, p.target.const_data_ptr(),
                        target_bytes(p.target), floats(p.weight), sum, total,
                        room > 0 ? workspace.mutable_data_ptr() : nullptr, p.rows, p.n, o.ignore_index, o.mean(),
                        current_stream(p.logits)),
                 kName);
}

void forward_cuda(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o,
                  Results& r, void* grad) {
    const c10::DeviceGuard guard(logits.device());
    const Problem p(logits, target, weight, o);
    const Tensor rows = o.none() ? r.loss : at::empty({p.rows}, r.loss.options());
    float* const total = o.mean() ? r.total.mutable_data_ptr<float>() : nullptr;
    if (grad != nullptr && total != nullptr) reduce_cuda(p, o, nullptr, nullptr, total);
    static const auto launch = FUSELINE_KERNEL(fuseline_cross_entropy_forward);
    check_launch(launch(p.logits.const_data_ptr(), p.target.const_data_ptr(), target_bytes(p.target), floats(p.weight),
                        floats(p.weight_sum), grad != nullptr ? total : nullptr, rows.mutable_data_ptr<float>(),
                        r.statistics.mutable_data_ptr<float>(), grad, p.rows, p.n, p.width, o.ignore_index,
                        o.label_smoothing, o.cap(), o.z_loss, kernel_dtype(logits, kName), current_stream(logits)),
                 kName);
    if (!o.none()) reduce_cuda(p, o, &rows, r.loss.mutable_data_ptr<float>(), grad != nullptr ? nullptr : total);
}

void backward_cuda(const Tensor& grad_out, const Tensor& logits, const Tensor& target, const Tensor& statistics,
                   const Tensor& total, const OptionalTensor& weight, const Options& o, Tensor& grad) {
    const c10::DeviceGuard guard(logits.device());
    const Problem p(logits, target, weight, o);
    const Tensor given = grad_out.contiguous();
    static const auto launch = FUSELINE_KERNEL(fuseline_cross_entropy_backward);
    check_launch(launch(p.logits.const_data_ptr(), p.target.const_data_ptr(), target_bytes(p.target), floats(p.weight),
                        floats(p.weight_sum), o.mean() ? total.const_data_ptr<float>() : nullptr,
                        statistics.const_data_ptr<float>(), given.const_data_ptr<float>(), !o.none(),
                        grad.mutable_data_ptr(), p.rows, p.n, p.width, o.ignore_index, o.label_smoothing, o.cap(),
                        o.z_loss,
                        kernel_dtype(logits, kName), current_stream(logits)),
                 kName);
}

void scale_rows_cuda(const Tensor& x, const Tensor& factors) {
    const c10::DeviceGuard guard(x.device());
    const Tensor each = factors.contiguous();
    if (x.numel() == 0) return;
    const int64_t n = x.size(-1);
    static const auto launch = FUSELINE_KERNEL(fuseline_scale_rows);
    check_launch(launch(x.mutable_data_ptr(), each.const_data_ptr<float>(), each.dim() == 0, x.numel() / n, n,
                        kernel_dtype(x, kName), current_stream(x)),
                 kName);
}

// ---- the ops ----

using Forward = void(const Tensor&, const Tensor&, const OptionalTensor&, const Options&, Results&, void*);
using Backward = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Options&, Tensor&);

void forward_meta(const Tensor&, const Tensor&, const OptionalTensor&, const Options&, Results&, void*) {}
void backward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                   const Options&, Tensor&) {}
void scale_rows_meta(const Tensor&, const Tensor&) {}

template <Forward fill>
Tensor cross_entropy(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                     FUSELINE_OPTION_PARAMETERS, bool) {
    const Options o = FUSELINE_OPTIONS;
    check(logits, target, weight, o);
    Results r = allocate(logits, target, o, false);
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
    Results r = allocate(logits, target, o, false);
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

bool tracks(const Tensor& logits) { return at::GradMode::is_enabled() && wants_grad(logits); }

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
        const auto weight = saved[4].defined() ? OptionalTensor(saved[4]) : std::nullopt;
        const Tensor grad = cross_entropy_backward_op(grads[0], saved[0], saved[1], saved[2], saved[3], weight, o);
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
        ctx->save_for_backward({grad});
        return loss;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        TORCH_CHECK(ctx->saved_data.find("spent") == ctx->saved_data.end(), kName, ": the gradient that was written in "
                    "the forward pass serves one backward pass, and this is another over the same graph. Call it "
                    "without grad_in_forward.");
        ctx->saved_data["spent"] = true;
        const Tensor grad = ctx->get_saved_variables()[0];
        scale_rows_op(grad, grads[0].to(accumulator_type(grad.scalar_type())));
        return {grad, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    }
};

Tensor cross_entropy_autograd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              FUSELINE_OPTION_PARAMETERS, bool grad_in_forward) {
    if (tracks(logits)) {
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
    if (tracks(logits)) {
        TORCH_CHECK_VALUE(!logits.is_leaf(), kName, ": inplace would overwrite a leaf tensor, whose values nobody "
                          "could compute again. Call it without inplace.");
        return CrossEntropyWithGradient::apply(logits, target, weight, ignore_index, label_smoothing, reduction,
                                               soft_cap, z_loss, vocab_size, true);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return cross_entropy_op(logits, target, weight, FUSELINE_OPTIONS, false);
}

Tensor cross_entropy_backward_autograd(const Tensor& grad_out, const Tensor& logits, const Tensor& target,
                                       const Tensor& statistics, const Tensor& total, const OptionalTensor& weight,
                                       FUSELINE_OPTION_PARAMETERS) {
    const Tensor result = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return cross_entropy_backward_op(grad_out, logits, target, statistics, total, weight, FUSELINE_OPTIONS);
    }();
    const bool tracked = at::GradMode::is_enabled() && (wants_grad(grad_out) || wants_grad(logits));
    return tracked ? NoSecondDerivative::apply(result, grad_out, logits, std::string(kName)) : result;
}

}  // namespace

#define FUSELINE_OPTION_SCHEMA \
    "int ignore_index, float label_smoothing, str reduction, float? soft_cap, float z_loss, SymInt? vocab_size"

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("cross_entropy(Tensor logits, Tensor target, *, Tensor? weight=None, int ignore_index=-100, "
          "float label_smoothing=0.0, str reduction=\"mean\", float? soft_cap=None, float z_loss=0.0, "
          "SymInt? vocab_size=None, bool grad_in_forward=False) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("cross_entropy_(Tensor(a!) logits, Tensor target, *, Tensor? weight=None, int ignore_index=-100, "
          "float label_smoothing=0.0, str reduction=\"mean\", float? soft_cap=None, float z_loss=0.0, "
          "SymInt? vocab_size=None) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, " FUSELINE_OPTION_SCHEMA
          ", bool gradient) -> (Tensor loss, Tensor statistics, Tensor total, Tensor grad)",
          {at::Tag::pt2_compliant_tag});
    m.def("cross_entropy_forward_(Tensor(a!) logits, Tensor target, Tensor? weight, " FUSELINE_OPTION_SCHEMA
          ") -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("cross_entropy_backward(Tensor grad_out, Tensor logits, Tensor target, Tensor statistics, Tensor total, "
          "Tensor? weight, " FUSELINE_OPTION_SCHEMA ") -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("scale_rows_(Tensor(a!) x, Tensor factors) -> ()", {at::Tag::pt2_compliant_tag});
}

#define FUSELINE_CROSS_ENTROPY_IMPL(key, device) \
    TORCH_LIBRARY_IMPL(fuseline, key, m) { \
        m.impl("cross_entropy", cross_entropy<forward_##device>); \
        m.impl("cross_entropy_forward", cross_entropy_forward<forward_##device>); \
        m.impl("cross_entropy_forward_", cross_entropy_forward_in_place<forward_##device>); \
        m.impl("cross_entropy_backward", cross_entropy_backward<backward_##device>); \
        m.impl("scale_rows_", scale_rows<scale_rows_##device>); \
    }

FUSELINE_CROSS_ENTROPY_IMPL(CPU, cpu)
FUSELINE_CROSS_ENTROPY_IMPL(CUDA, cuda)
FUSELINE_CROSS_ENTROPY_IMPL(Meta, meta)

TORCH_LIBRARY_IMPL(fuseline, Autograd, m) {
    m.impl("cross_entropy", cross_entropy_autograd);
    m.impl("cross_entropy_", cross_entropy_in_place_autograd);
    m.impl("cross_entropy_backward", cross_entropy_backward_autograd);
}

}  // namespace fuseline
