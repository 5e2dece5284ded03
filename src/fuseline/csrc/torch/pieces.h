// ATen's elementwise kernels, made repeatable: they take what does not fill a vector by another formula, and where
// that is depends on how many threads share the tensor.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace fuseline {

// compute(out, in...) over flat pieces of contiguous tensors of one shape, cut the same way for any number of threads.
template <typename Compute, typename... In>
at::Tensor in_pieces(const Compute& compute, const at::Tensor& first, const In&... others) {
    constexpr int64_t piece = 16384;
    at::Tensor result = at::empty(first.sizes(), first.options());
    const int64_t count = result.numel();
    const auto flat = [](const at::Tensor& t) { return t.contiguous().view(-1); };
    const auto run = [&](const at::Tensor& out, const auto&... in) {
        at::parallel_for(0, (count + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
            const at::AutoDispatchBelowADInplaceOrView guard;  // other threads do not inherit it
            for (int64_t start = begin * piece; start < std::min(count, end * piece); start += piece) {
                const int64_t length = std::min(piece, count - start);
                at::Tensor to = out.narrow(0, start, length);
                compute(to, in.narrow(0, start, length)...);
            }
        });
    };
    run(result.view(-1), flat(first), flat(others)...);
    return result;
}

}  // namespace fuseline
