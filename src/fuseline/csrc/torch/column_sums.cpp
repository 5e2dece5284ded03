// On a GPU by a kernel of one pass (kernels/linear/column_sums.cu), elsewhere, and in float64, by torch.

#include "column_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace fuseline {

Tensor column_sums(const Tensor& rows, at::ScalarType dtype) {
    constexpr const char* kName = "column_sums";
    if (!rows.is_cuda() || rows.scalar_type() == at::kDouble) return rows.sum(at::IntArrayRef{0}, /*keepdim=*/false, dtype);
    const int64_t m = rows.size(0), n = rows.size(1);
    const int from = kernel_dtype(rows, kName);
    const Tensor sums = at::empty({n}, rows.options().dtype(dtype));
    static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_column_sums_workspace);
    const Tensor workspace = at::empty({int64_t(workspace_bytes(m, n, from))}, rows.options().dtype(at::kByte));
    static const auto launch = FUSELINE_KERNEL(fuseline_column_sums);
    check_launch(launch(rows.const_data_ptr(), sums.mutable_data_ptr(), workspace.mutable_data_ptr(), m, n, from,
                        kernel_dtype(sums, kName), current_stream(rows)),
                 kName);
    return sums;
}

}  // namespace fuseline
