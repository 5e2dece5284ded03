// The norms on CPU and CUDA: over contiguous tensors, for norms.cpp.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "dropout.h"
#include "fuseline_kernels.h"
#include "norms.h"

namespace fuseline {
namespace {

constexpr const char* kNorm = "norm";

void* data_or_null(const Tensor& x) { return x.defined() ? x.data_ptr() : nullptr; }

const Tensor* any_of(std::initializer_list<const OptionalTensor*> given) {
    for (const OptionalTensor* tensor : given) {
        if (tensor->has_value()) return &**tensor;
    }
    return nullptr;
}

bool drops(const Norm& norm) { return norm.seed.has_value() && norm.p > 0; }

// ---- CPU ----

// residual + dropout(x + x_bias), rounded once.
void add_up(const Norm& norm, const Tensor& sum) {
    const auto type = accumulator_type(norm.x.scalar_type());
    Tensor total = norm.x.to(type);
    if (norm.x_bias.has_value()) total = total.add(norm.x_bias->to(type));
    if (drops(norm)) total = total.mul(dropout_factors(norm.x, norm.p, *norm.seed));
    sum.copy_(total.add(norm.residual->to(type)));
}

// Rows [0, rows) in parts that are cut the same way for any number of threads, their sums added up in order: the same
// bits every time.
template <typename Part>
void sum_columns(int64_t rows, int64_t n, const Tensor& like, std::initializer_list<const Tensor*> results,
                 int64_t scratch, const Part& run_part) {
    constexpr int64_t most_parts = 64, fewest_rows = 8;
    const int64_t part_rows = std::max(fewest_rows, (rows + most_parts - 1) / most_parts);
    const int64_t parts = (rows + part_rows - 1) / part_rows;
    const auto options = like.options().dtype(accumulator_type(like.scalar_type()));
    std::vector<Tensor> partials;
    for (const Tensor* result : results) {
        partials.push_back(result->defined() ? at::zeros({parts, n}, options) : Tensor());
    }
    const auto partial = [&](size_t which, int64_t part) -> void* {
        if (!partials[which].defined()) return nullptr;
        return static_cast<char*>(partials[which].data_ptr()) + part * n * partials[which].element_size();
    };
    const int64_t grain = std::max<int64_t>(1, row_grain(n) / part_rows);
    parallel_rows(parts, grain, scratch, [&](int64_t begin, int64_t end, void* room) {
        for (int64_t part = begin; part < end; ++part) {
            run_part(part * part_rows, std::min(rows, (part + 1) * part_rows),
                     [&](size_t which) { return partial(which, part); }, room);
        }
    });
    static const auto add_parts = FUSELINE_PICK(cpu::column_sums);
    size_t which = 0;
    for (const Tensor* result : results) {
        if (result->defined()) {
            const cpu::ColumnSums columns{partial(which, 0), parts, n, result->data_ptr(), cpu_type(*result, kNorm),
                                          options.dtype() == at::kDouble};
            at::parallel_for(0, n, row_grain(parts),
                             [&](int64_t begin, int64_t end) { add_parts(columns, begin, end); });
        }
        ++which;
    }
}

}  // namespace

void norm_forward_cpu(const Norm& norm, const Normalized& result) {
    if (norm.residual.has_value()) add_up(norm, result.sum);
    const Tensor& x = norm.residual.has_value() ? result.sum : norm.x;
    const Tensor* affine = any_of({&norm.weight, &norm.bias});
    const auto type = cpu_type(x, kNorm);
    // These kernels have one dtype for both; a y of fewer bits is rounded after them.
    const bool narrow = result.y.scalar_type() != x.scalar_type();
    const Tensor y = narrow ? at::empty_like(x) : result.y;
    const cpu::LayerNormForward task{x.const_data_ptr(),
                                     fuseline::data_or_null(norm.weight),
                                     fuseline::data_or_null(norm.bias),
                                     y.data_ptr(),
                                     data_or_null(result.mean),
                                     data_or_null(result.rstd),
                                     norm.n,
                                     norm.eps,
                                     type,
                                     affine == nullptr ? type : cpu_type(*affine, kNorm),
                                     norm.centred};
    static const auto run = FUSELINE_PICK(cpu::layer_norm_forward);
    parallel_rows(norm.rows, row_grain(norm.n), task.scratch(),
                  [&](int64_t begin, int64_t end, void* scratch) { run(task, begin, end, scratch); });
    if (narrow) result.y.copy_(y);
}

void norm_backward_cpu(const Norm& norm, const Normalized& given, const NormGradients& grads) {
    // y of a norm without weight and bias is a row of mean 0 and rstd 1, of which the gradient is multiplied by rstd.
    const bool normalized = given.y.defined();
    const Tensor ones = normalized ? at::ones_like(given.rstd) : Tensor();
    const Normalized saved = normalized ? Normalized{given.y, given.y.to(at::kFloat), at::zeros_like(given.rstd), ones} : given;
    const auto type = cpu_type(saved.sum, kNorm);
    const bool wants_rows = grads.residual.defined() || grads.x.defined() || grads.x_bias.defined();
    const Tensor rows = !wants_rows ? Tensor() : grads.residual.defined() ? grads.residual : at::empty_like(saved.sum);
    const Tensor grad_y = grads.grad_y->to(saved.sum.scalar_type());
    const cpu::LayerNormBackward task{grad_y.const_data_ptr(),
                                      saved.sum.const_data_ptr(),
                                      fuseline::data_or_null(norm.weight),
                                      norm.centred ? saved.mean.const_data_ptr() : nullptr,
                                      saved.rstd.const_data_ptr(),
                                      data_or_null(rows),
                                      norm.n,
                                      type,
                                      norm.weight.has_value() ? cpu_type(*norm.weight, kNorm) : type};
    static const auto run = FUSELINE_PICK(cpu::layer_norm_backward);
    sum_columns(norm.rows, norm.n, saved.sum, {&grads.weight, &grads.bias}, task.scratch(),
                [&](int64_t begin, int64_t end, const auto& partial, void* scratch) {
                    run(task, cpu::LayerNormPartial{partial(0), partial(1)}, begin, end, scratch);
                });
    if (!wants_rows) return;
    if (normalized) rows.view({norm.rows, norm.n}).mul_(given.rstd.reshape({norm.rows, 1}));
    if (grads.grad_sum.has_value()) rows.add_(*grads.grad_sum);
    if (!grads.x.defined() && !grads.x_bias.defined()) return;
    const Tensor wide = rows.to(accumulator_type(rows.scalar_type()));
    const Tensor dropped = drops(norm) ? wide.mul(dropout_factors(norm.x, norm.p, *norm.seed)) : wide;
    if (grads.x.defined()) grads.x.copy_(dropped);
    if (!grads.x_bias.defined()) return;
    const cpu::LayerNormBackward sums{dropped.const_data_ptr(), dropped.const_data_ptr(), nullptr, nullptr,
                                      saved.rstd.const_data_ptr(), nullptr, norm.n, cpu_type(dropped, kNorm),
                                      cpu_type(dropped, kNorm)};
    sum_columns(norm.rows, norm.n, saved.sum, {&grads.x_bias}, sums.scratch(),
                [&](int64_t begin, int64_t end, const auto& partial, void* scratch) {
                    run(sums, cpu::LayerNormPartial{nullptr, partial(0)}, begin, end, scratch);
                });
}

// ---- CUDA ----

namespace {

// `normalized` and `y`: tensors of their dtypes.
fuseline_norm kernel_arguments(const Norm& norm, const Tensor& normalized, const Tensor& y, const Tensor* affine) {
    fuseline_norm task{};
    task.kind = norm.centred ? FUSELINE_LAYER_NORM : FUSELINE_RMS_NORM;
    task.dtype = kernel_dtype(normalized, kNorm);
    task.y_dtype = kernel_dtype(y, kNorm);
    task.weight_dtype = affine == nullptr ? task.y_dtype : kernel_dtype(*affine, kNorm);
    task.rows = norm.rows, task.n = norm.n, task.eps = norm.eps;
    if (drops(norm)) {
        task.dropout = norm.p;
        task.seed = norm.seed->const_data_ptr<int64_t>();
    }
    task.weight = fuseline::data_or_null(norm.weight);
    return task;
}

}  // namespace

void norm_forward_cuda(const Norm& norm, const Normalized& result) {
    fuseline_norm task = kernel_arguments(norm, norm.residual.has_value() ? *norm.residual : norm.x, result.y,
                                          any_of({&norm.weight, &norm.bias, &norm.x_bias}));
    task.x = norm.x.const_data_ptr();
    task.residual = fuseline::data_or_null(norm.residual);
    task.x_bias = fuseline::data_or_null(norm.x_bias);
    task.bias = fuseline::data_or_null(norm.bias);
    task.y = result.y.data_ptr();
    task.sum = data_or_null(result.sum);
    task.mean = static_cast<float*>(data_or_null(result.mean));
    task.rstd = static_cast<float*>(data_or_null(result.rstd));
    static const auto launch = FUSELINE_KERNEL(fuseline_norm_forward);
    check_launch(launch(&task, current_stream(norm.x)), kNorm);
}

void norm_backward_cuda(const Norm& norm, const Normalized& saved, const NormGradients& grads) {
    const OptionalTensor none;
    const auto given = [&](const Tensor& t) { return t.defined() ? OptionalTensor(t) : none; };
    const OptionalTensor weight = given(grads.weight), bias = given(grads.bias), x_bias = given(grads.x_bias);
    const bool normalized = saved.y.defined();
    const Tensor& x = normalized ? saved.y : saved.sum;
    fuseline_norm task = kernel_arguments(norm, x, *grads.grad_y, any_of({&norm.weight, &weight, &bias, &x_bias}));
    if (normalized) task.normalized = true, task.dtype = FUSELINE_FLOAT32;
    task.x = x.const_data_ptr();
    task.mean = static_cast<float*>(data_or_null(saved.mean));
    task.rstd = static_cast<float*>(data_or_null(saved.rstd));
    task.grad_y = grads.grad_y->const_data_ptr();
    task.grad_sum = fuseline::data_or_null(grads.grad_sum);
    Tensor rows = grads.residual, dropped = grads.x;
    if (grads.x_bias.defined()) {  // few rows take its sums from what was written
        Tensor& source = drops(norm) ? dropped : rows;
        const auto of_rows = normalized ? at::kFloat : x.scalar_type();
        if (!source.defined()) source = at::empty_like(x, drops(norm) ? grads.grad_y->scalar_type() : of_rows);
    }
    task.grad_x = data_or_null(rows);
    task.grad_dropped = data_or_null(dropped);
    task.grad_weight = data_or_null(grads.weight);
    task.grad_bias = data_or_null(grads.bias);
    task.grad_x_bias = data_or_null(grads.x_bias);
    static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_norm_backward_workspace);
    const auto bytes = static_cast<int64_t>(workspace_bytes(&task));
    const Tensor workspace = bytes > 0 ? at::empty({bytes}, norm.x.options().dtype(at::kByte)) : Tensor();
    static const auto launch = FUSELINE_KERNEL(fuseline_norm_backward);
    check_launch(launch(&task, data_or_null(workspace), current_stream(norm.x)), "norm_backward");
}

}  // namespace fuseline
