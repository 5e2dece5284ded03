// A step of AdamW over many parameters, and the norm of many gradients, on CUDA; fuseline.optim runs torch's own
// elsewhere.
//
// Versions of weights and state are not incremented, as torch's fused optimizers do not.

#include <ATen/ops/empty.h>

#include <map>
#include <vector>

#include "fuseline_optimizer.h"
#include "op.h"

namespace fuseline::optimizer_op {
namespace {

constexpr const char* kAdamW = "adamw";
constexpr const char* kNorm = "gradient_norm";
constexpr size_t kSettings = 5;  // of a group: learning rate, beta1, beta2, eps, weight decay

using OptionalTensors = c10::List<std::optional<Tensor>>;

void check_word(const char* op, const Tensor& x, const char* name, const Tensor& beside) {
    TORCH_CHECK_VALUE(x.scalar_type() == at::kInt && x.numel() == 1 && x.device() == beside.device(), op, ": ", name,
                      " is ", x.scalar_type(), " of shape ", x.sizes(), " on ", x.device(), "; it is one int32 on ",
                      beside.device(), ", zero.");
}

const float* one_float(const char* op, const OptionalTensor& x, const char* name, const Tensor& beside) {
    if (!x.has_value()) return nullptr;
    TORCH_CHECK_VALUE(x->scalar_type() == at::kFloat && x->numel() == 1 && x->device() == beside.device(), op, ": ", name,
                      " is ", x->scalar_type(), " of shape ", x->sizes(), " on ", x->device(), "; it is one float32 on ",
                      beside.device(), ".");
    return x->const_data_ptr<float>();
}

// That a tensor's elements stand in the order of the weight's, without gaps.
void check_like(const Tensor& x, const char* name, const Tensor& weight) {
    TORCH_CHECK_VALUE(x.device() == weight.device() && x.sizes() == weight.sizes() && x.is_non_overlapping_and_dense() &&
                          (x.strides() == weight.strides() || (x.is_contiguous() && weight.is_contiguous())),
                      kAdamW, ": ", name, " has shape ", x.sizes(), " and strides ", x.strides(), " on ", x.device(),
                      "; a weight of shape ", weight.sizes(), " and strides ", weight.strides(), " on ", weight.device(),
                      " wants the same, without gaps.");
}

void adamw_cuda(at::TensorList weights, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                at::TensorList steps, at::IntArrayRef sizes, const OptionalTensors& rates, at::ArrayRef<double> settings,
                const OptionalTensor& norm, double max_norm, const OptionalTensor& found_inf, const Tensor& arrived) {
    const size_t count = weights.size();
    TORCH_CHECK_VALUE(grads.size() == count && exp_avgs.size() == count && exp_avg_sqs.size() == count &&
                          steps.size() == count,
                      kAdamW, ": ", count, " weights have ", grads.size(), " gradients, ", exp_avgs.size(), " and ",
                      exp_avg_sqs.size(), " moments and ", steps.size(), " steps; each has one.");
    TORCH_CHECK_VALUE(rates.size() == sizes.size() && settings.size() == kSettings * sizes.size(), kAdamW, ": ",
                      sizes.size(), " groups have ", rates.size(), " learning rates and ", settings.size(),
                      " settings; each has one and ", kSettings, ".");
    if (count == 0) return;
    const Tensor& first = weights[0];
    check_word(kAdamW, arrived, "arrived", first);
    const float* const norm_at = one_float(kAdamW, norm, "norm", first);
    const float* const inf_at = one_float(kAdamW, found_inf, "found_inf", first);

    std::map<int, std::vector<fuseline_adamw_parameter>> launches;  // by dtype
    size_t i = 0;
    for (size_t group = 0; group < sizes.size(); ++group) {
        const OptionalTensor rate = rates.get(group);
        const float* const lr_at = one_float(kAdamW, rate, "a learning rate", first);
        const double* const given = settings.data() + kSettings * group;
        for (int64_t of_group = 0; of_group < sizes[group]; ++of_group, ++i) {
            TORCH_CHECK_VALUE(i < count, kAdamW, ": groups have more parameters than the ", count, " given.");
            const Tensor& weight = weights[i];
            TORCH_CHECK_VALUE(weight.device() == first.device(), kAdamW, ": weights are on ", first.device(), " and ",
                              weight.device(), "; a call is for one device.");
            check_like(weight, "a weight", weight);
            check_like(grads[i], "a gradient", weight);
            check_like(exp_avgs[i], "exp_avg", weight);
            check_like(exp_avg_sqs[i], "exp_avg_sq", weight);
            check_same_dtype(kAdamW, grads[i], "a gradient", weight, "its weight");
            check_same_dtype(kAdamW, exp_avgs[i], "exp_avg", weight, "its weight");
            check_same_dtype(kAdamW, exp_avg_sqs[i], "exp_avg_sq", weight, "its weight");
            fuseline_adamw_parameter p{};
            p.weight = weight.mutable_data_ptr();
            p.grad = grads[i].const_data_ptr();
            p.exp_avg = exp_avgs[i].mutable_data_ptr();
            p.exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr();
            p.step = const_cast<float*>(one_float(kAdamW, steps[i], "a step", first));
            p.lr_at = lr_at;
            p.count = weight.numel();
            p.lr = float(given[0]), p.beta1 = float(given[1]), p.beta2 = float(given[2]), p.eps = float(given[3]);
            p.weight_decay = float(given[4]);
            launches[kernel_dtype(weight, kAdamW)].push_back(p);
        }
    }
    TORCH_CHECK_VALUE(i == count, kAdamW, ": groups have ", i, " parameters of the ", count, " given.");
    const c10::DeviceGuard guard(first.device());
    static const auto launch = FUSELINE_KERNEL(fuseline_adamw);
    for (const auto& [dtype, parameters] : launches) {
        check_launch(launch(parameters.data(), int64_t(parameters.size()), dtype, norm_at, max_norm, inf_at,
                            static_cast<uint32_t*>(arrived.mutable_data_ptr()), current_stream(first)),
                     kAdamW);
    }
}

void adamw_meta(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::IntArrayRef,
                const OptionalTensors&, at::ArrayRef<double>, const OptionalTensor&, double, const OptionalTensor&,
                const Tensor&) {}

Tensor gradient_norm_cuda(at::TensorList grads, const Tensor& arrived) {
    TORCH_CHECK_VALUE(!grads.empty(), kNorm, ": there is no gradient.");
    check_word(kNorm, arrived, "arrived", grads[0]);
    std::vector<const void*> at;
    std::vector<int64_t> counts;
    std::vector<int> dtypes;
    for (const Tensor& grad : grads) {
        check_device(kNorm, grad, "a gradient", grads[0], "another");
        TORCH_CHECK_VALUE(grad.is_non_overlapping_and_dense(), kNorm, ": a gradient of shape ", grad.sizes(), " has strides ",
                          grad.strides(), "; its elements stand without gaps.");
        at.push_back(grad.const_data_ptr()), counts.push_back(grad.numel()), dtypes.push_back(kernel_dtype(grad, kNorm));
    }
    const c10::DeviceGuard guard(grads[0].device());
    static const auto workspace_of = FUSELINE_KERNEL(fuseline_gradient_norm_workspace);
    static const auto launch = FUSELINE_KERNEL(fuseline_gradient_norm);
    const int64_t tensors = int64_t(grads.size()), sums = workspace_of(counts.data(), dtypes.data(), tensors);
    TORCH_CHECK(sums >= 0, kNorm, ": the device does not say how many blocks it holds.");
    const Tensor room = at::empty({sums + 1}, grads[0].options().dtype(at::kFloat));
    float* const norm = room.mutable_data_ptr<float>();
    check_launch(launch(at.data(), counts.data(), dtypes.data(), tensors, norm, norm + 1,
                        static_cast<uint32_t*>(arrived.mutable_data_ptr()), current_stream(grads[0])),
                 kNorm);
    return room.select(0, 0);
}

Tensor gradient_norm_meta(at::TensorList grads, const Tensor&) {
    TORCH_CHECK_VALUE(!grads.empty(), kNorm, ": there is no gradient.");
    return at::empty({}, grads[0].options().dtype(at::kFloat));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("launches_large_arguments() -> bool", [] {
        static const auto ask = FUSELINE_KERNEL(fuseline_launches_large_arguments);
        return ask() != 0;
    });
    define_on_cuda(m, "adamw(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
                      "Tensor(d!)[] steps, int[] sizes, Tensor?[] rates, float[] settings, Tensor? norm, "
                      "float max_norm, Tensor? found_inf, Tensor(e!) arrived) -> ()",
                   adamw_cuda, adamw_meta);
    define_on_cuda(m, "gradient_norm(Tensor[] grads, Tensor(a!) arrived) -> Tensor", gradient_norm_cuda, gradient_norm_meta);
}

}  // namespace fuseline::optimizer_op
