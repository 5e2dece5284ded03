// Linear layers with quantized weights, or plain ones read at full bandwidth for few rows, and the gradient to x.
//
// Formats: "int8" and "int4" in the kernels' layout (kernels/fuseline_quant.h), and "plain", the [N, K] weight of
// torch.nn.Linear in x's dtype. The kernels take up to `most_linear_rows` rows (kernels/plans/linear.h) of activations; more rows, float32 activations
// on CUDA, and the backward go over the dequantized weight and torch's matrix product.

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>

#include "cpu/quant_linear.h"
#include "plans/linear.h"
#include "quant_weight.h"
#include "unmodified_since_last_read.h"
#include "op.h"

namespace fuseline::quant_linear_op {
namespace {

using namespace quantized;

// Beyond it the weight is dequantized once for all rows.
constexpr int64_t cpu_kernel_rows = 16;

// Tiles that a thread takes at least: 65,536 products are some 5 us, below which a second one costs what it brings.
int64_t tile_grain(int64_t K, int64_t M) {
    return std::max<int64_t>(1, 65536 / std::max<int64_t>(1, K * M * cpu::tile_rows));
}

Tensor forward_op(const Tensor& x, const Weight& w, const OptionalTensor& bias) {
    constexpr Op<"quant_linear", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                        const OptionalTensor&, int64_t, c10::string_view, int64_t)> op;
    return op(x, w.weight, w.scales, w.zeros, bias, w.out_features, w.format, w.group_size);
}

Tensor backward_op(const Tensor& grad_out, const Weight& w, c10::SymInt in_features) {
    constexpr Op<"quant_linear_backward", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                 c10::SymInt, int64_t, c10::string_view, int64_t)> op;
    return op(grad_out, w.weight, w.scales, w.zeros, in_features, w.out_features, w.format, w.group_size);
}

c10::SymDimVector output_sizes(const Tensor& x, const c10::SymInt& last) {
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.back() = last;
    return sizes;
}

int64_t count_rows(const Tensor& x) {
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
    return rows;
}

// ---- CPU ----

// Asking first spares small layers the dispatcher, which takes as long as they do.
Tensor in_float(const Tensor& given) {
    return (given.scalar_type() == at::kFloat ? given : given.to(at::kFloat)).contiguous();
}

// The weight with scales in float, held while a task reads it.
struct WeightOnCpu {
    Tensor weight, scales;
    OptionalTensor zeros;
    cpu::QuantWeights task;

    WeightOnCpu(const Weight& w, int64_t K)
        : weight(w.weight.contiguous()), scales(in_float(*w.scales)), zeros(contiguous(w.zeros)) {
        task = {weight.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
                static_cast<const uint8_t*>(data_or_null(zeros)), w.out_features, K, w.int4() ? w.group_size : 0,
                w.int4()};
    }
    int64_t tiles() const { return (task.n + cpu::tile_rows - 1) / cpu::tile_rows; }
};

Tensor dequantize_cpu(const Weight& w, int64_t K, at::ScalarType type) {
    if (w.plain()) return w.weight;
    static const auto dequantize = FUSELINE_PICK(cpu::dequantize);
    const WeightOnCpu on(w, K);
    const bool is_double = type == at::kDouble;
    const Tensor to = at::empty({w.out_features, K}, on.scales.options().dtype(is_double ? at::kDouble : at::kFloat));
    const cpu::Dequantize task{on.task, to.data_ptr(), is_double};
    at::parallel_for(0, on.tiles(), row_grain(K * cpu::tile_rows),
                     [&](int64_t begin, int64_t end) { dequantize(task, begin, end); });
    return to.to(type);
}

Tensor quant_linear_cpu(const Tensor& x, FUSELINE_WEIGHT_PARAMETERS, const OptionalTensor& bias,
                        FUSELINE_FORMAT_PARAMETERS) {
    const WithoutAutocast off;
    const Weight w = FUSELINE_WEIGHT;
    check(x, w, bias);
    const int64_t K = x.size(-1), M = count_rows(x);
    if (w.plain() || M > cpu_kernel_rows || x.scalar_type() == at::kDouble) {
        const auto wide = w.plain() ? x.scalar_type() : accumulator_type(x.scalar_type());
        const auto shift = bias.has_value() ? OptionalTensor(bias->to(wide)) : std::nullopt;
        return at::linear(x.to(wide), dequantize_cpu(w, K, wide), shift).to(x.scalar_type());
    }
    static const auto rows = FUSELINE_PICK(cpu::quant_linear);
    const WeightOnCpu on(w, K);
    const bool is_float = x.scalar_type() == at::kFloat;
    const int64_t width = (K + 63) / 64 * 64;
    Tensor wide = x.contiguous();
    if (!is_float || width != K) {
        const Tensor few = is_float ? wide : wide.to(at::kFloat);
        wide = at::empty({M, width}, on.scales.options());
        for (int64_t m = 0; m < M; ++m) {
            float* const row = wide.data_ptr<float>() + m * width;
            std::copy_n(few.const_data_ptr<float>() + m * K, K, row);
            std::fill(row + K, row + width, 0.f);
        }
    }
    const Tensor shift = bias.has_value() ? in_float(*bias) : Tensor();
    c10::DimVector sizes(x.sizes());
    sizes.back() = out_features;
    const Tensor y = at::empty(sizes, on.scales.options());
    const cpu::QuantLinear task{on.task, wide.const_data_ptr<float>(), shift.defined() ? shift.const_data_ptr<float>() : nullptr,
                                y.data_ptr<float>(), M};
    at::parallel_for(0, on.tiles(), tile_grain(K, M), [&](int64_t begin, int64_t end) {
        const std::unique_ptr<float[]> scratch(new float[task.scratch()]);
        rows(task, begin, end, scratch.get());
    });
    return is_float ? y : y.to(x.scalar_type());
}

Tensor backward_cpu(const Tensor& grad_out, FUSELINE_WEIGHT_PARAMETERS, c10::SymInt in_features,
                    FUSELINE_FORMAT_PARAMETERS) {
    const WithoutAutocast off;
    const Weight w = FUSELINE_WEIGHT;
    check_weight(grad_out, in_features, w);
    const int64_t K = in_features.expect_int();
    const auto wide = w.plain() ? grad_out.scalar_type() : accumulator_type(grad_out.scalar_type());
    return at::matmul(grad_out.to(wide), dequantize_cpu(w, K, wide)).to(grad_out.scalar_type());
}

// ---- CUDA ----

// The weight as a kernel takes it, held while it is queued.
struct WeightOnCuda {
    Tensor weight;
    OptionalTensor scales, zeros;

    explicit WeightOnCuda(const Weight& w) : weight(w.plain() ? w.weight.contiguous() : aligned(w.weight)) {
        if (!w.plain()) scales = aligned(w.scales->to(w.int4() ? at::kBFloat16 : at::kFloat));
        if (w.zeros.has_value()) zeros = aligned(*w.zeros);
    }
    // Whether the kernel reads the given tensors themselves, and nothing has modified them since an earlier call read them.
    bool unmodified_since_last_read(const Weight& w, void* stream) const {
        static UnmodifiedSinceLastRead seen;
        static const auto capture = FUSELINE_KERNEL(fuseline_capture_id);
        const auto same = [](const OptionalTensor& here, const OptionalTensor& given) {
            return !here.has_value() || here->is_same(*given);
        };
        if (!weight.is_same(w.weight) || !same(scales, w.scales) || !same(zeros, w.zeros)) return false;
        const UnmodifiedSinceLastRead::Tensors all{&weight, scales.has_value() ? &*scales : nullptr,
                                                   zeros.has_value() ? &*zeros : nullptr};
        return seen.known(all, stream, capture(stream));
    }
    fuseline_linear call(const Weight& w, int64_t K, int dtype) const {
        fuseline_linear call{};
        call.format = w.code(), call.dtype = dtype;
        call.weight = weight.const_data_ptr(), call.scales = data_or_null(scales), call.zeros = data_or_null(zeros);
        call.n = w.out_features, call.k = K, call.weight_stride = K, call.group_size = w.group_size;
        return call;
    }
};

Tensor dequantize_cuda(const Weight& w, int64_t K, const Tensor& like) {
    if (w.plain()) return w.weight;
    const WeightOnCuda on(w);
    Tensor to = at::empty({w.out_features, K}, like.options());
    fuseline_linear call = on.call(w, K, kernel_dtype(like, kName));
    call.y = to.data_ptr();
    static const auto launch = FUSELINE_KERNEL(fuseline_dequantize);
    check_launch(launch(&call, current_stream(like)), kName);
    return to;
}

Tensor quant_linear_cuda(const Tensor& given, FUSELINE_WEIGHT_PARAMETERS, const OptionalTensor& bias,
                         FUSELINE_FORMAT_PARAMETERS) {
    const WithoutAutocast off;
    const Weight w = FUSELINE_WEIGHT;
    check(given, w, bias);
    const c10::DeviceGuard guard(given.device());
    const int64_t K = given.size(-1), M = count_rows(given);
    const bool half = given.scalar_type() == at::kHalf || given.scalar_type() == at::kBFloat16;
    if (!half || M > most_linear_rows(w.code(), w.out_features, K)) {
        return at::linear(given.contiguous(), dequantize_cuda(w, K, given), bias);
    }
    Tensor y = at::empty_symint(output_sizes(given, out_features), given.options());
    if (y.numel() == 0) return y;
    // Rows with unit stride at one distance: a slice of a batch needs no copy.
    const Tensor x = given.dim() == 2 && given.stride(1) == 1 ? given : given.reshape({M, K}).contiguous();
    const OptionalTensor shift = contiguous(bias);
    const WeightOnCuda on(w);
    fuseline_linear call = on.call(w, K, kernel_dtype(x, kName));
    call.x = x.const_data_ptr(), call.bias = data_or_null(shift), call.y = y.data_ptr();
    call.m = M, call.x_stride = x.stride(0);
    static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_quant_linear_workspace);
    Tensor workspace;
    if (M > kRowsWithoutWorkspace) workspace = at::empty({workspace_bytes(call.format, M, K)}, x.options().dtype(at::kByte));
    call.workspace = workspace.defined() ? workspace.data_ptr() : nullptr;
    static const auto launch = FUSELINE_KERNEL(fuseline_quant_linear);
    call.overlap = on.unmodified_since_last_read(w, current_stream(x));
    // From here on nothing may fail, because the next call counts on this launch.
    const int answer = launch(&call, current_stream(x));
    if (answer == FUSELINE_UNSUPPORTED) return at::linear(given.contiguous(), dequantize_cuda(w, K, given), bias);
    check_launch(answer, kName);
    return y;
}

Tensor backward_cuda(const Tensor& grad_out, FUSELINE_WEIGHT_PARAMETERS, c10::SymInt in_features,
                     FUSELINE_FORMAT_PARAMETERS) {
    const WithoutAutocast off;
    const Weight w = FUSELINE_WEIGHT;
    check_weight(grad_out, in_features, w);
    const c10::DeviceGuard guard(grad_out.device());
    return at::matmul(grad_out.contiguous(), dequantize_cuda(w, in_features.expect_int(), grad_out));
}

// ---- Meta and Autograd ----

Tensor quant_linear_meta(const Tensor& x, FUSELINE_WEIGHT_PARAMETERS, const OptionalTensor& bias,
                         FUSELINE_FORMAT_PARAMETERS) {
    check(x, FUSELINE_WEIGHT, bias);
    return at::empty_symint(output_sizes(x, out_features), x.options());
}

Tensor backward_meta(const Tensor& grad_out, FUSELINE_WEIGHT_PARAMETERS, c10::SymInt in_features,
                     FUSELINE_FORMAT_PARAMETERS) {
    check_weight(grad_out, in_features, FUSELINE_WEIGHT);
    return at::empty_symint(output_sizes(grad_out, in_features), grad_out.options());
}

struct QuantLinear : torch::autograd::Function<QuantLinear> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Weight& w, const OptionalTensor& bias) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        ctx->saved_data["in_features"] = x.sym_size(-1);
        ctx->saved_data["out_features"] = w.out_features;
        ctx->saved_data["format"] = std::string(w.format);
        ctx->saved_data["group_size"] = w.group_size;
        ctx->save_for_backward({w.weight, w.scales.value_or(Tensor()), w.zeros.value_or(Tensor())});
        return forward_op(x, w, bias);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const OptionalTensor scales = optional(saved[1]), zeros = optional(saved[2]);
        const std::string format = ctx->saved_data["format"].toStringRef();
        const Weight w{saved[0], scales, zeros, ctx->saved_data["out_features"].toInt(), format,
                       ctx->saved_data["group_size"].toInt()};
        return {backward_op(grads[0], w, ctx->saved_data["in_features"].toSymInt()), Tensor(), Tensor()};
    }
};

Tensor quant_linear_autograd(const Tensor& x, FUSELINE_WEIGHT_PARAMETERS, const OptionalTensor& bias,
                             FUSELINE_FORMAT_PARAMETERS) {
    const Weight w = FUSELINE_WEIGHT;
    if (at::GradMode::is_enabled()) {
        TORCH_CHECK_NOT_IMPLEMENTED(!wants_grad(weight) && !wants_grad(scales) && !wants_grad(bias), kName,
                                    ": the weight, its scales and the bias are frozen here, and one of them requires a "
                                    "gradient. Detach it, or use torch.nn.functional.linear.");
        if (wants_grad(x)) {
            check(x, w, bias);
            return QuantLinear::apply(x, w, bias);
        }
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_op(x, w, bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "quant_linear(Tensor x, Tensor weight, Tensor? scales=None, Tensor? zeros=None, Tensor? bias=None, *, "
              "int out_features, str format=\"int8\", int group_size=0) -> Tensor",
           quant_linear_cpu, quant_linear_cuda, quant_linear_meta);
    define(m, "quant_linear_backward(Tensor grad_out, Tensor weight, Tensor? scales, Tensor? zeros, *, SymInt in_features, "
              "int out_features, str format, int group_size) -> Tensor", backward_cpu, backward_cuda, backward_meta);
    differentiate<quant_linear_autograd>(m, "quant_linear");
    refuse_second_derivative<"quant_linear_backward", "quant_linear", backward_meta>(m);
}

}  // namespace fuseline::quant_linear_op
