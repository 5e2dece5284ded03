// The door to libfuseline_kernels, opened by Python with the library's path, and what the ops' files share.

#include "op.h"

#include <c10/util/accumulate.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace fuseline {
namespace {

std::mutex mutex;
void* kernels = nullptr;

std::string open_kernels(const char* path) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (kernels != nullptr) return "";
    void* opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) return dlerror();
    const auto version = reinterpret_cast<decltype(&fuseline_kernels_abi_version)>(
        dlsym(opened, "fuseline_kernels_abi_version"));
    const int found = version == nullptr ? 0 : version();
    if (found != FUSELINE_KERNELS_ABI_VERSION) {
        dlclose(opened);
        return "it has interface version " + std::to_string(found) + ", this library calls version " +
               std::to_string(FUSELINE_KERNELS_ABI_VERSION);
    }
    kernels = opened;
    return "";
}

}  // namespace

void* kernel_symbol(const char* name) {
    const std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(kernels != nullptr,
                "libfuseline_kernels.so is not loaded, so torch.ops.fuseline has no CUDA kernels. Call the functions "
                "in fuseline.ops, which load it or run their references; `fuseline doctor` says what is missing.");
    void* symbol = dlsym(kernels, name);
    TORCH_CHECK(symbol != nullptr, "libfuseline_kernels.so has no function ", name, "; `fuseline build` makes it anew.");
    return symbol;
}

void check_launch(int code, const char* op) {
    if (code == 0) return;
    static const auto describe = FUSELINE_KERNEL(fuseline_error_string);
    TORCH_CHECK(false, op, " on CUDA: ", describe(code), " (code ", code, ")");
}

int kernel_dtype(const Tensor& x, const char* op) {
    const auto type = x.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, op,
                     " on CUDA takes float32, float16 and bfloat16, not ", type,
                     ". The function in fuseline.ops runs its reference for float64.");
    return type == at::kFloat ? FUSELINE_FLOAT32 : type == at::kHalf ? FUSELINE_FLOAT16 : FUSELINE_BFLOAT16;
}

cpu::Type cpu_type(const Tensor& x, const char* op) {
    const auto type = x.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble, op,
                     " takes float32, float64, float16 and bfloat16, not ", type, ".");
    return type == at::kFloat      ? cpu::Type::f32
           : type == at::kHalf     ? cpu::Type::f16
           : type == at::kBFloat16 ? cpu::Type::bf16
                                   : cpu::Type::f64;
}

Tensor NoSecondDerivative::forward(AutogradContext* ctx, const Tensor& result, const Tensor&, const Tensor&,
                                   const std::string& op) {
    ctx->saved_data["op"] = op;
    return result.view_as(result);
}

variable_list NoSecondDerivative::backward(AutogradContext* ctx, const variable_list&) {
    const std::string op = ctx->saved_data["op"].toStringRef();
    TORCH_CHECK_NOT_IMPLEMENTED(false, "fuseline.ops.", op, " has no second derivative. Its reference has one: "
                                "fuseline.ops.get(\"", op, "\").reference(...) takes the same arguments.");
    return {};
}

Tensor of_running_node(const Tensor& kept) {
    const Tensor result = kept.detach();  // `kept` itself would hold the node that holds it
    torch::autograd::impl::set_gradient_edge(result, {torch::autograd::get_current_node(), 0});
    return result;
}

void check_device(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name) {
    TORCH_CHECK_VALUE(given.device() == x.device(), op, ": ", name, " is on ", given.device(), " and ", x_name, " on ",
                      x.device(), ".");
}

void check_same_shape(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name) {
    TORCH_CHECK_VALUE(given.sym_sizes() == x.sym_sizes(), op, ": ", name, " has shape ", given.sym_sizes(), " and ", x_name, " ",
                      x.sym_sizes(), "; they are the same.");
}

void check_same_dtype(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name) {
    TORCH_CHECK_TYPE(given.scalar_type() == x.scalar_type(), op, ": ", name, " is ", given.scalar_type(), " and ", x_name, " ",
                     x.scalar_type(), "; they are the same.");
}

void check_same_dtype_or_float(const char* op, const Tensor& given, const char* name, const Tensor& x, const char* x_name) {
    TORCH_CHECK_TYPE(given.scalar_type() == x.scalar_type() || given.scalar_type() == at::kFloat, op, ": ", name, " is ",
                     given.scalar_type(), " and ", x_name, " ", x.scalar_type(), ". It has ", x_name, "'s dtype or float32.");
}

void check_probability(const char* op, double p) {
    TORCH_CHECK_VALUE(p >= 0 && p <= 1, op, ": dropout probability p=", p, " is not between 0 and 1.");
}

void check_seed(const char* op, const Tensor& seed, const Tensor& x) {
    TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, op, ": seed is ", seed.scalar_type(), ", not Long.");
    TORCH_CHECK_VALUE(seed.sym_numel() == 1, op, ": seed has shape ", seed.sym_sizes(), "; it is one element.");
    check_device(op, seed, "seed", x);
}

Tensor aligned(const Tensor& x) {
    const Tensor dense = x.contiguous();
    return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

Tensor rows_of(const Tensor& x) {
    return x.contiguous().view({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

}  // namespace fuseline

extern "C" __attribute__((visibility("default"))) const char* fuseline_torch_load_kernels(const char* path) {
    static thread_local std::string complaint;
    complaint = fuseline::open_kernels(path);
    return complaint.c_str();
}
