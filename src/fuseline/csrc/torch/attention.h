// One attention call as torch gives it: what attention.cpp (schema, checks, autograd), attention_cpu.cpp and
// attention_gpu.cpp share.

#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "op.h"

namespace fuseline {

struct AttentionCall {
    Tensor q, k, v;  // [B, H, T, D], [B, Hkv, S, D], the same
    OptionalTensor mask, sinks, cu_seqlens_q, cu_seqlens_k, seed;
    int64_t max_seqlen_q, max_seqlen_k, causal, window_left, window_right;
    double softmax_scale, soft_cap, dropout_p;

    bool drops() const { return dropout_p > 0; }
    bool packed() const { return cu_seqlens_q.has_value(); }
};

using AttentionOut = std::tuple<Tensor, Tensor>;                            // out, lse
using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // of q, k, v, mask, sinks
using Wanted = std::array<bool, 5>;                                         // which of these

// x's sizes, contiguous but with heads and rows the way round they lie in x.
Tensor empty_as_heads_lie(const Tensor& x);

// On the CPU, put together from ATen's kernels for some query rows at a time.
AttentionOut attention_on_cpu(const AttentionCall& call);
AttentionGradients attention_backward_on_cpu(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                             const AttentionCall& call, const Tensor& out, const Tensor& lse,
                                             const Wanted& wanted);

// Memory for the gradients of q, k and v: views of one packed tensor, say.
using HeadGradients = std::array<Tensor, 3>;

// Whose kernel computes the forward pass; the backward pass is always ours.
enum class ForwardBy : int64_t { kFuseline = 0, kCudnn = 1, kFlash = 2 };

// On the GPU, by the kernels. Gradients that are not wanted come back empty; those of q, k and v are written into `into`
// where it is given.
AttentionOut attention_on_gpu(const AttentionCall& call, ForwardBy forward_by);
AttentionGradients attention_backward_on_gpu(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                             const AttentionCall& call, const Tensor& out, const Tensor& lse,
                                             const Wanted& wanted, const HeadGradients* into = nullptr);

}  // namespace fuseline
