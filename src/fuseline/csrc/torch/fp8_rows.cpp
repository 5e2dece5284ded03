// Rows as e4m3, each with its own scale, in one pass over them on a GPU (fuseline/ops/fp8_linear.py has the rest).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "fuseline_quant.h"
#include "fuseline_torch.h"

namespace fuseline::fp8_rows_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "fp8_rows";
constexpr int64_t kStep = 16;  // elements that the kernel takes at a time

Two fp8_rows_meta(const Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 2, kName, ": x has ", x.dim(), " dimensions; it is [rows, K].");
    return {at::empty_symint(x.sym_sizes(), x.options().dtype(at::kFloat8_e4m3fn)),
            at::empty_symint({x.sym_size(0), 1}, x.options().dtype(at::kFloat))};
}

// As it is, or a copy whose rows stand at multiples of 16 bytes.
Tensor at_vectors(const Tensor& x) {
    const bool stands = x.stride(1) == 1 && (x.size(0) <= 1 || x.stride(0) * x.element_size() % 16 == 0) &&
                        reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    return stands ? x : x.clone(at::MemoryFormat::Contiguous);
}

Two fp8_rows_cuda(const Tensor& x) {
    auto [y, scales] = fp8_rows_meta(x);
    TORCH_CHECK_VALUE(x.size(1) > 0 && x.size(1) % kStep == 0, kName, ": x has ", x.size(1),
                      " columns; they are a multiple of ", kStep, ".");
    if (x.size(0) == 0) return {y, scales};
    const c10::DeviceGuard guard(x.device());
    const Tensor rows = at_vectors(x);
    static const auto launch = FUSELINE_KERNEL(fuseline_fp8_rows);
    check_launch(launch(rows.const_data_ptr(), y.data_ptr(), scales.data_ptr<float>(), rows.size(0), rows.size(1),
                        rows.size(0) > 1 ? rows.stride(0) : rows.size(1), kernel_dtype(x, kName), current_stream(x)),
                 kName);
    return {y, scales};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) { m.def("fp8_rows(Tensor x) -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag}); }

TORCH_LIBRARY_IMPL(fuseline, CUDA, m) { m.impl("fp8_rows", fp8_rows_cuda); }

TORCH_LIBRARY_IMPL(fuseline, Meta, m) { m.impl("fp8_rows", fp8_rows_meta); }

}  // namespace fuseline::fp8_rows_op
