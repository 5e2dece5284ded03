// Rows as 8-bit floating point, each with its own scale, and bytes transposed, in one pass each on a GPU
// (fuseline/ops/fp8_rows.py has the rest).

#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "fuseline_fp8.h"
#include "op.h"

namespace fuseline::fp8_rows_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "fp8_rows";
constexpr const char* kTranspose = "fp8_transpose";
constexpr int64_t kStep = 16;  // elements that the kernels take at a time

Two fp8_rows_meta(const Tensor& x, const OptionalTensor&, bool e5m2) {
    TORCH_CHECK_VALUE(x.dim() == 2, kName, ": x has ", x.dim(), " dimensions; it is [rows, K].");
    return {at::empty_symint(x.sym_sizes(), x.options().dtype(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn)),
            at::empty_symint({x.sym_size(0), 1}, x.options().dtype(at::kFloat))};
}

// As it is, or a copy whose rows stand at multiples of 16 bytes.
Tensor at_vectors(const Tensor& x) {
    const bool stands = x.stride(1) == 1 && (x.size(0) <= 1 || x.stride(0) * x.element_size() % 16 == 0) &&
                        reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    return stands ? x : x.clone(at::MemoryFormat::Contiguous);
}

Two fp8_rows_cuda(const Tensor& x, const OptionalTensor& columns, bool e5m2) {
    auto [y, scales] = fp8_rows_meta(x, columns, e5m2);
    TORCH_CHECK_VALUE(x.size(1) > 0 && x.size(1) % kStep == 0, kName, ": x has ", x.size(1),
                      " columns; they are a multiple of ", kStep, ".");
    TORCH_CHECK_VALUE(!columns.has_value() || (columns->scalar_type() == at::kFloat && columns->device() == x.device() &&
                                               columns->numel() == x.size(1)),
                      kName, ": columns is not float32 of ", x.size(1), " elements on ", x.device(), ".");
    if (x.size(0) == 0) return {y, scales};
    const c10::DeviceGuard guard(x.device());
    const Tensor rows = at_vectors(x);
    const OptionalTensor factors = vectors(columns);
    static const auto launch = FUSELINE_KERNEL(fuseline_to_fp8);
    check_launch(launch(rows.const_data_ptr(), static_cast<const float*>(data_or_null(factors)), y.data_ptr(),
                        scales.data_ptr<float>(), rows.size(0), rows.size(1),
                        rows.size(0) > 1 ? rows.stride(0) : rows.size(1), kernel_dtype(x, kName),
                        e5m2 ? FUSELINE_E5M2 : FUSELINE_E4M3, current_stream(x)),
                 kName);
    return {y, scales};
}

Tensor fp8_transpose_meta(const Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 2, kTranspose, ": x has ", x.dim(), " dimensions; it is [rows, N].");
    return at::empty_symint({x.sym_size(1), x.sym_size(0)}, x.options());
}

Tensor fp8_transpose_cuda(const Tensor& x) {
    TORCH_CHECK_TYPE(x.element_size() == 1, kTranspose, ": x is ", x.scalar_type(), "; its elements are bytes.");
    Tensor y = fp8_transpose_meta(x);
    TORCH_CHECK_VALUE(x.size(0) % kStep == 0 && x.size(1) % kStep == 0, kTranspose, ": x has shape ", x.sizes(),
                      "; both sizes are multiples of ", kStep, ".");
    const c10::DeviceGuard guard(x.device());
    const Tensor rows = vectors(x);
    static const auto launch = FUSELINE_KERNEL(fuseline_fp8_transpose);
    check_launch(launch(rows.const_data_ptr(), y.data_ptr(), rows.size(0), rows.size(1), current_stream(x)), kTranspose);
    return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "fp8_rows(Tensor x, Tensor? columns=None, bool e5m2=False) -> (Tensor, Tensor)",
                   fp8_rows_cuda, fp8_rows_meta);
    define_on_cuda(m, "fp8_transpose(Tensor x) -> Tensor", fp8_transpose_cuda, fp8_transpose_meta);
}

}  // namespace fuseline::fp8_rows_op
