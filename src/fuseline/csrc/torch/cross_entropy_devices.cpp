// The cross-entropy on CPU and CUDA, for cross_entropy.cpp.

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include "cross_entropy.h"

namespace fuseline::losses {
namespace {

// The tensors of one call, as the kernels take them.
struct Problem {
    Tensor logits, target;
    OptionalTensor weight, weight_sum;
    int64_t rows, n, width;

    Problem(const Tensor& given, const Tensor& targets, const OptionalTensor& weights, const Options& o)
        : logits(given.contiguous()), target(targets.contiguous()), n(o.columns(given)), width(given.size(-1)) {
        rows = target.numel();
        if (!weights.has_value()) return;
        weight = weights->to(accumulator_type(given.scalar_type())).contiguous();
        if (o.label_smoothing != 0) weight_sum = weight->sum();
    }
};

const float* floats(const OptionalTensor& x) { return x.has_value() ? x->const_data_ptr<float>() : nullptr; }

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
    task.total = 1, task.statistics = statistics.defined() ? statistics.mutable_data_ptr() : nullptr;
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

}  // namespace

void forward_cpu(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o,
                 Results& r, void* grad) {
    const Problem p(logits, target.to(at::kLong), weight, o);
    check_targets(p.target, p.n, o.ignore_index);
    cpu::CrossEntropy task = task_for(p, o, r.statistics);
    const Tensor rows = o.none() ? r.loss : at::empty({p.rows}, r.loss.options());
    task.loss = rows.mutable_data_ptr(), task.grad = grad;
    if (o.mean()) {
        task.total = total_on_cpu(p, o);
        if (r.total.defined()) r.total.fill_(task.total);
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

namespace {

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

}  // namespace

void forward_cuda(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Options& o,
                  Results& r, void* grad) {
    const c10::DeviceGuard guard(logits.device());
    const Problem p(logits, target, weight, o);
    const Tensor rows = o.none() ? r.loss : at::empty({p.rows}, r.loss.options());
    float* const total = o.mean() && r.total.defined() ? r.total.mutable_data_ptr<float>() : nullptr;
    float* const statistics = r.statistics.defined() ? r.statistics.mutable_data_ptr<float>() : nullptr;
    const bool counted = grad != nullptr && total != nullptr;
    if (counted) reduce_cuda(p, o, nullptr, nullptr, total);
    static const auto launch = FUSELINE_KERNEL(fuseline_cross_entropy_forward);
    check_launch(launch(p.logits.const_data_ptr(), p.target.const_data_ptr(), target_bytes(p.target), floats(p.weight),
                        floats(p.weight_sum), counted ? total : nullptr, counted, rows.mutable_data_ptr<float>(),
                        statistics, grad, p.rows, p.n, p.width, o.ignore_index,
                        o.label_smoothing, o.cap(), o.z_loss, kernel_dtype(logits, kName), current_stream(logits)),
                 kName);
    if (!o.none()) reduce_cuda(p, o, &rows, r.loss.mutable_data_ptr<float>(), counted ? nullptr : total);
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
                        o.z_loss, kernel_dtype(logits, kName), current_stream(logits)),
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

}  // namespace fuseline::losses
